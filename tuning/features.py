# SPDX-License-Identifier: Apache-2.0
"""What the cost model sees of a candidate: the pattern, how the format stores it, the choices, and analytic terms.

Every number has a name, so that a model can say which of them it used. Sizes and times enter as logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.ir import SparseBuffer
from sparsetir.machine import last_cache, private_cache
from sparsetir.schedules import Choices
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.ceilings import USUAL, Rates
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.work import Work

NO_WORK = Work()
GRID = 8  # cells of the density image in each direction
BINS = 12  # of the histogram of row lengths
KINDS = (
    *("", "bsr", "dbsr", "blocks", "row_groups", "sr_bcrs", "buckets", "hyb", "columns", "rows", "sell", "ell"),
    *("ell_rest", "padded_csr", "nm", "dense_rows", "dense_columns", "dia", "dia_rest", "band", "csf"),
    *("narrow_csr", "narrow_sell", "reordered", "hdia"),
)
# The choices among the columns of the shipped model, in its order; the columns of all others come last.
CHOICES = ("tile", "chunks", "unroll", "prefetch", "stream", "carry", "panel", "lanes")


@dataclass(frozen=True)
class Stored:
    """How a format stores the argument.

    Parameters
    ----------
    values : int
        Stored, padding included.
    bytes : int
        Of values and index arrays.
    pieces : int
    rows : int
        Of a block, side by side in a kernel.
    seconds : float
        The conversion took.
    """

    values: int
    bytes: int
    pieces: int = 1
    rows: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Operands:
    """Sizes of a call.

    Parameters
    ----------
    feat : int
        Length of a dense row of the result.
    gathered, result : int
        Bytes of what is gathered and of the results.
    itemsize, threads : int
    width : int
        Length of a gathered row; 0 if it is that of the result.
    work : Work
        What the program does.
    rates : Rates
        Of the machine.
    """

    feat: int
    gathered: int
    result: int
    itemsize: int
    threads: int
    width: int = 0
    work: Work = NO_WORK
    rates: Rates = USUAL

    @classmethod
    def of(cls, work: Work, threads: int, rates: Rates = USUAL) -> Operands:
        """Those of a program's work."""
        gathered = work.gathered
        feat = max((int(a.run) for a in work.results), default=1)
        held = int(gathered.held) if gathered is not None else 0
        result = int(sum(a.held for a in work.results))
        return cls(feat, held, result, work.itemsize, threads, work.width, work, rates)


def log(value: float) -> float:
    """On a logarithmic scale, 0 for nothing."""
    return math.log2(1.0 + max(value, 0.0))


def of_pattern(pattern: Pattern | None) -> dict[str, float]:
    """Numbers of a pattern; of a tensor only its sizes."""
    if pattern is None:
        return {}
    found = {"nnz": log(pattern.nnz), "rows": log(pattern.shape[0]), "columns": log(pattern.shape[-1])}
    found |= {f"fibers_{d}": log(n) for d, n in enumerate(pattern.fibers)}
    return {**found, **_of_matrix(pattern)} if isinstance(pattern, MatrixPattern) else found


def _of_matrix(p: MatrixPattern) -> dict[str, float]:
    nnz, (m, n) = max(p.nnz, 1), p.shape
    found = {"panel_columns": p.panel_columns, "diagonals": log(p.diagonals), "diagonal_share": p.diagonal_share}
    found |= {"slice_diagonal_share": p.slice_diagonal_share}
    found |= {"below": p.bandwidth[0] / max(m, 1), "above": p.bandwidth[1] / max(n, 1), "sliced": p.sliced / nnz}
    found |= {"reuse": log(p.reuse_distance or m), "symmetry": p.symmetry or 0.0, "profile": log(sum(p.profile) / nnz)}
    for name, held in (("row", p.rows), ("column", p.columns)):
        count = max(held.count, 1)
        found |= {f"{name}_mean": log(held.mean), f"{name}_max": log(held.max), f"{name}_cv": held.cv}
        found |= {f"{name}_gini": held.gini, f"{name}_empty": held.empty / count, f"{name}_median": log(held.median)}
    bins = [*p.rows.histogram, *([0] * BINS)][:BINS]
    found |= {f"length_{2**k // 2}": held / max(m, 1) for k, held in enumerate(bins)}
    found |= {f"fill_{r}x{c}": fill.fill for (r, c), fill in p.blocks.items()}
    return found | {f"imbalance_{parts}": log(value) for parts, value in p.imbalance.items()}


def density(indptr: np.ndarray, indices: np.ndarray, columns: int) -> dict[str, float]:
    """A coarse image of a matrix: the share of the entries in each cell of a grid, and its unevenness at each level."""
    rows = len(indptr) - 1
    if not rows or not columns or not indices.size:
        return {}
    edges = indptr[np.linspace(0, rows, GRID + 1).astype(np.int64)]
    image = np.array(
        [
            np.bincount(indices[a:b].astype(np.int64) * GRID // columns, minlength=GRID)[:GRID]
            for a, b in pairwise(edges)
        ]
    )
    found, level, size = {}, image / indices.size, GRID
    while size > 1:
        found[f"uneven_{size}"] = float(level.std() * size * size)
        level = level.reshape(size // 2, 2, size // 2, 2).sum(axis=(1, 3))
        size //= 2
    return found | {f"cell_{i}_{j}": float(image[i, j] / indices.size) for i in range(GRID) for j in range(GRID)}


def of_candidate(
    candidate: Candidate, stored: Stored, operands: Operands, nnz: int, values: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Numbers of a format and of choices, and what follows from both; `values` has the candidates of knobs."""
    name = candidate.format.name if candidate.format is not None else ""
    kinds = {f"is_{kind or 'own'}": float(name == kind) for kind in KINDS}
    choices = candidate.choices
    facts = {"padding": stored.values / max(nnz, 1), "bytes": log(stored.bytes), "pieces": float(stored.pieces)}
    facts |= {"block_rows": float(stored.rows), "threads": float(operands.threads)}
    facts |= {"feat": log(operands.feat), "width": log(operands.width or operands.feat)}
    if isinstance(choices, Config):
        return {**kinds, **of_knobs(choices, values or {}), **facts}
    chosen = {name: log(getattr(choices, name)) for name in CHOICES}
    return {**kinds, **chosen, **facts, **_analytic(choices, stored, operands)}


def of_other_choices(choices: Choices | Config) -> dict[str, float]:
    """Numbers of choices that the shipped model does not know."""
    if isinstance(choices, Config):
        return {}
    return {name: log(value) for name, value in choices.as_dict().items() if name not in CHOICES}


def of_work(stored: Stored, operands: Operands, nnz: int) -> dict[str, float]:
    """Numbers of what the program does, with as much padding as the format has."""
    return operands.work.numbers(operands.rates, max(stored.values / max(nnz, 1), 1e-3))


def of_knobs(config: Config, values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of knobs: a logarithm for each part of a split or number, for other values their place in the list."""
    found = {}
    for name, value in config.as_dict().items():
        listed = list(values.get(name, (value,)))
        if not all(_is_number(part) for other in listed for part in _parts(other)):
            found[f"knob {name}"] = float(listed.index(value)) if value in listed else -1.0
            continue
        for n, part in enumerate(_parts(value)):
            if part is not None:
                column = f"knob {name}[{n}]" if isinstance(value, tuple) else f"knob {name}"
                found[column] = math.copysign(log(abs(part)), part)
    return found


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_number(part: Any) -> bool:
    """Whether it has a place on a scale, or is left open."""
    return part is None or isinstance(part, (int, float))


def _analytic(choices: Choices, stored: Stored, operands: Operands) -> dict[str, float]:
    """Bytes that move, and what they mean for the caches."""
    width = operands.width or operands.feat
    row = width * operands.itemsize
    tiles = -(-width // max(choices.tile, 1))
    panels = -(-width // choices.panel) if choices.panel else 1
    window = operands.gathered // max(panels, 1)
    traffic = stored.values / stored.rows * row
    packed = 2 * operands.gathered if choices.panel else 0
    return {
        "tiles": log(tiles),
        "tail": width % max(choices.tile, 1) / max(choices.tile, 1),
        "panels": log(panels),
        "window_in_cache": log(window / private_cache()),
        "result_in_cache": log(operands.result / last_cache()),
        "gathered_bytes": log(traffic),
        "index_bytes": log(stored.bytes * panels),
        "packed_bytes": log(packed),
        "use_of_a_row": log(traffic / max(operands.gathered, 1)),
        "flops": log(2.0 * stored.values * width),
        "per_chunk": log(stored.values / max(choices.chunks, 1)),
        "is_serial": float(choices.chunks == 0),
    }


def main_buffer(buffers: Mapping[Any, SparseBuffer], arrays: Mapping[str, np.ndarray]) -> SparseBuffer | None:
    """The sparse parameter with most values."""
    held = [b for b in buffers.values() if not b.is_dense and str(b.storage.name) in arrays]
    return max(held, key=lambda b: arrays[str(b.storage.name)].size, default=None)


__all__ = [
    "Operands",
    "Stored",
    "density",
    "main_buffer",
    "of_candidate",
    "of_knobs",
    "of_other_choices",
    "of_pattern",
    "of_work",
]
