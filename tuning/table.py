# SPDX-License-Identifier: Apache-2.0
"""A data set as a table with a row for each point, for other programs to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, TuningError
from sparsetir.harness import optional
from sparsetir.tuning.dataset import lines

SUFFIXES = (".parquet", ".npz")


def rows(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The points of some cases, a dict of plain values each; the same names in all."""
    for line in found:
        job, (first, second) = line["job"], line["plain"]
        of_case = {name: line[name] for name in ("case", "matrix", "family", "machine", "sparsetir")}
        of_case |= {"mcpu": line.get("mcpu", "")}
        of_case |= {"op": job["op"], "feat": job["feat"], "dtype": job["dtype"], "threads": job["threads"]}
        of_case |= {"load": max(line["load"]), "plain_seconds_1": first, "plain_seconds_2": second}
        of_case |= {name: line["structure"][name] for name in ("nnz", "rows", "columns", "longest")}
        for format, choices, stored, conversion, one, two in line["points"]:
            kept = dict(zip(("stored_values", "stored_bytes", "pieces", "block_rows"), stored, strict=True))
            text = " ".join(f"{name}={value}" for name, value in choices.items())
            yield {
                **of_case,
                "format": format,
                "choices": text,
                **kept,
                "conversion_seconds": conversion,
                "seconds_1": one,
                "seconds_2": two,
                "noise": abs(float(np.log(one / two))),
            }


def columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a data set.

    Raises
    ------
    TuningError
        It holds no points.
    """
    found = list(rows(lines(path)))
    if not found:
        raise TuningError(f"{path} holds no points yet: `sparsetir collect {path}` measures some")
    return {name: np.array([row[name] for row in found]) for name in found[0]}


def export(path: Path, out: Path) -> Path:
    """Write a data set as a table.

    Parameters
    ----------
    path : Path
        Of a data set.
    out : Path
        ``.parquet``, which needs pyarrow (extra ``data``), or ``.npz``, an array a column.

    Raises
    ------
    ArgumentError
        The table has another suffix.
    MissingPackageError
        pyarrow is needed and not installed.
    """
    if out.suffix not in SUFFIXES:
        raise ArgumentError(f"expected a table {' or '.join(SUFFIXES)}; found {out.name}")
    found = columns(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        np.savez_compressed(out, allow_pickle=False, **found)
        return out
    arrow = optional.require("pyarrow", extra="data", purpose="a table as parquet")
    parquet = optional.require("pyarrow.parquet", extra="data", purpose="a table as parquet")
    parquet.write_table(arrow.table({name: arrow.array(list(values)) for name, values in found.items()}), out)
    return out


def summary(path: Path) -> list[list[str]]:
    """How much a data set holds, and how far two measurements of a point are apart, by operation; a heading first."""
    found: dict[str, list[Any]] = {}
    for line in lines(path):
        job = line["job"]
        found.setdefault(f"{job['op'].partition('_')[0]} {job['dtype']}, threads {job['threads']}", []).append(line)
    table = [["", "points", "cases", "matrices", "families", "noise: median", "95th percentile", "load"]]
    for name, held in [*sorted(found.items()), ("all", [line for part in found.values() for line in part])]:
        noise = [abs(np.log(p[-2] / p[-1])) for line in held for p in line["points"]]
        counts = Counter(key for line in held for key in {("m", line["matrix"]), ("f", line["family"])})
        matrices, families = (sum(key[0] == which for key in counts) for which in "mf")
        apart = [f"{np.percentile(noise, q):.1%}" for q in (50, 95)] if noise else ["", ""]
        load = f"{np.median([max(line['load']) for line in held]):.1f}" if held else ""
        table.append([name, f"{len(noise):,}", f"{len(held):,}", str(matrices), str(families), *apart, load])
    return table


__all__ = ["columns", "export", "rows", "summary"]
