#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whether the compiler still makes the same loops: a hash of the stage-III text of many programs.

    python tests/replay.py                    compare with tests/golden/replay.json
    python tests/replay.py --update           write it anew
    python tests/replay.py --texts before     write the texts to a folder, to be compared with those of another commit
    python tests/replay.py --only spmm        names that contain this

A name is program|types|format|choices. All programs of the corpus are lowered for every type they are made for, under
each of `CHOICES`, and over `TREES`; the ready programs over every format of the tests. The loops depend on nothing but
the program, the choices, the target and the number of threads, of which the last two are fixed. Attributes of
functions, which are notes of one pass to another, are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sparsetir
from corpus import BY_NAME
from decomposing import FORMATS, OPERANDS, made
from sparsetir import formats
from sparsetir.codegen.cache import Compiled
from sparsetir.codegen.target import make_target
from sparsetir.errors import SparseTIRError
from sparsetir.ir.views import decode
from sparsetir.lower import single

GOLDEN = Path(__file__).parent / "golden" / "replay.json"
TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}
THREADS = 2
INDEX_TYPES = ("int32", "int64")
CHOICES: dict[str, dict[str, int]] = {
    "narrow": {"tile": 8, "chunks": 0},
    "unroll": {"tile": 32, "chunks": 4, "unroll": 4},
    "prefetch": {"chunks": 8, "prefetch": 8},
    "carry": {"chunks": 6, "carry": 1},
    "panel": {"chunks": 2, "panel": 32},
    "lanes": {"chunks": 2, "lanes": 8},
    "stream": {"chunks": 2, "stream": 1},
    "many": {"tile": 16, "chunks": 4, "unroll": 2, "prefetch": 4, "carry": 1, "lanes": 4, "panel": 32},
}
TREES = ("coo", "csf")  # formats of tensors of any order
DECOMPOSED = ("default", "unroll", "carry")  # of which programs over formats are lowered

Subject = Callable[[], Any]


def subjects() -> Iterator[tuple[str, Subject, str]]:
    """Name, program and choices of every case."""
    for case in BY_NAME.values():
        for dtype, idtype in product(case.dtypes, INDEX_TYPES):
            yield f"{case.name}|{dtype} {idtype}||default", partial(case.make, dtype, idtype), "default"
        for choices in CHOICES:
            yield f"{case.name}|{case.dtypes[0]} int32||{choices}", partial(case.make, case.dtypes[0], "int32"), choices
        for name in TREES:
            subject = partial(_over, partial(case.make, case.dtypes[0], "int32"), name)
            yield f"{case.name}|{case.dtypes[0]} int32|{name}|default", subject, "default"
    for (op, operand), name, choices in product(OPERANDS.items(), FORMATS, DECOMPOSED):
        yield f"{op}|float32 int32|{name}|{choices}", partial(_decomposed, op, operand, name), choices


def _decomposed(op: str, operand: str, name: str) -> Any:
    return sparsetir.decompose_format(getattr(sparsetir.ops, op)(), {operand: made(name)})


def _over(make: Subject, name: str) -> Any:
    """The program with its first sparse buffer in another format, or as it is."""
    func = make()
    sparse = [b.name for b in decode(func).buffers.values() if not b.is_dense and not b.allocated]
    return sparsetir.decompose_format(func, {sparse[0]: formats.make(name)}) if sparse else func


def text(subject: Subject, choices: str) -> str:
    """The loops, or the sentence with which they are refused."""
    point = None if choices == "default" else sparsetir.Choices(**{"chunks": THREADS, **CHOICES[choices]})
    try:
        made = subject()
        func = single(getattr(made, "func", made))
        lines = sparsetir.script(Compiled(func, make_target(TARGET, func), point).stage(3)).splitlines()
        return "\n".join(line for line in lines if "T.func_attr(" not in line)
    except SparseTIRError as error:
        return f"{type(error).__name__}: {error}"


def hashed(content: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@cache
def _cases() -> dict[str, tuple[Subject, str]]:
    return {name: (subject, choices) for name, subject, choices in subjects()}


def _run(name: str) -> tuple[str, str]:
    return name, text(*_cases()[name])


def texts(names: list[str], jobs: int) -> Iterator[tuple[str, str]]:
    """Name and text of each case."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run, names, chunksize=16)


def report(found: dict[str, str], known: dict[str, str], *, is_all: bool) -> list[str]:
    """What differs, a line each."""
    changed = ((name, known.get(name, "new"), value) for name, value in found.items() if known.get(name) != value)
    lines = [f"{name}: {before} -> {after}" for name, before, after in changed]
    return lines + [f"{name}: gone" for name in known if is_all and name not in found]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the hashes")
    parser.add_argument("--texts", type=Path, help="folder for the texts")
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--every", type=int, default=1, help="every so many of the names")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args(arguments)
    os.environ["TVM_NUM_THREADS"] = str(THREADS)
    names = [name for name in _cases() if given.only in name][:: given.every]
    is_all = not given.only and given.every == 1
    found = {}
    for name, content in texts(names, given.jobs):
        found[name] = hashed(content)
        if given.texts:
            given.texts.mkdir(parents=True, exist_ok=True)
            (given.texts / f"{name.replace('|', '.').replace(' ', '-')}.txt").write_text(content)
        if len(found) % 100 == 0:
            print(f"{len(found)} of {len(names)}", file=sys.stderr, flush=True)
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    differences = report(found, known, is_all=is_all)
    print("\n".join(differences) or f"{len(found)} texts, all as before")
    if given.update:
        kept = {} if is_all else known
        GOLDEN.write_text(json.dumps({**kept, **found}, indent=0, sort_keys=True) + "\n")
        return 0
    return min(len(differences), 1)


if __name__ == "__main__":
    sys.exit(main())
