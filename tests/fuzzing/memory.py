# SPDX-License-Identifier: Apache-2.0
"""Histories of calls in which all memory ends at unreadable pages, that of the package itself among it.

    python tests/fuzzing/memory.py --group accumulators

A case is one kernel, or one function of the package, on inputs that grow and shrink, in several turns: on one thread or
two, with memory that earlier calls left or without, which ends at an unreadable page or begins after one, and with
other numbers in it. Every turn must give what scipy gives, or else the same as the first.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any
from unittest import mock

os.environ.setdefault("SPARSETIR_CACHE", "off")
os.environ.setdefault("TVM_NUM_THREADS", "2")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import scipy.sparse as sp

import sparsetir
from corpus import CASES
from corpus.case import Case as Program
from corpus.computed import PROGRAMS, SHAPES, draw_arguments
from corpus.running import check, draw, run
from each import FULL, pairwise
from fences import Everything, environment
from product_oracle import check_sorted, drawn
from quick_code import quick_code
from sparsetir import Accumulators, formats, kernel_factory, ops
from sparsetir.sparse_output import AccumulatorOptions, fast_paths, products, workspace
from sparsetir.sparse_output import kernel as assembled
from sparsetir.sparse_output import triangles as counting
from sparsetir.sparse_output.accumulators import KINDS, ORDERS
from sparsetir.sparse_output.small import ROWS_AHEAD
from sparsetir.utils import buffers

SECONDS = 300  # in which a child has answered, however busy the machine is
Dense = np.ndarray
Matrices = dict[str, sp.csr_array]
TYPES = (("float32", "int32"), ("float64", "int64"), ("int32", "int32"), ("int8", "int64"))


# ---------------------------------------------------------------------------------------------- turns


@dataclass(frozen=True)
class Turn:
    """How memory is handed out while a history of calls is made.

    Parameters
    ----------
    threads : int
        Which also share the least work.
    keeps : bool
        Whether calls find what earlier ones left.
    begins : bool
        Whether memory begins after an unreadable page instead of ending at one.
    fill : int
        The byte of which new memory is full.
    patches : dict
        Of module to its names, what they stand for.
    """

    threads: int = 2
    keeps: bool = True
    begins: bool = False
    fill: int = 0x7F
    patches: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "begins after" if self.begins else "ends at"
        kept = "kept" if self.keeps else "new"
        patched = [f", {n}={v}" for values in self.patches.values() for n, v in values.items() if isinstance(v, int)]
        memory = f"{kept} memory that {where} unreadable pages, full of {self.fill:#x}"
        return f"{self.threads} threads, {memory}{''.join(patched)}"

    @contextlib.contextmanager
    def taken(self, fences: Everything) -> Iterator[None]:
        """What holds while the turn lasts."""
        fences.place(begins=self.begins, fill=self.fill)
        sparsetir.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            for module, values in {**SHARED, **({} if self.keeps else DROPPED), **self.patches}.items():
                stack.enter_context(mock.patch.multiple(module, **values))
            yield


def dropped(held: list[Any]) -> Iterator[Any]:
    """Nothing of what earlier calls left, as `popped` gives it."""
    held.clear()
    return iter(())


#: little work is shared already, and the counts of rows, too
SHARED: dict[Any, dict[str, Any]] = {
    counting: {"SERIAL_WORK": 0},
    workspace: {"SERIAL_WORK": 0, "MERGED_SERIAL_WORK": 0},
    assembled: {"SERIAL_WORK": 0},
    fast_paths: {"SHARED_WORK": -1},
}
FILLER = buffers.OutputPool.filler
DROPPED: dict[Any, dict[str, Any]] = {
    workspace: {**SHARED[workspace], "popped": dropped},
    assembled: {**SHARED[assembled], "popped": dropped},
    fast_paths: {**SHARED[fast_paths], "popped": dropped},
    buffers.BufferPool: {"take": lambda rooms, count: tuple(np.empty(count, d) for d in rooms.dtypes)},
    buffers.OutputPool: {"filler": lambda _, *place: lambda listed: FILLER(buffers.OutputPool(), *place)(listed)},
}
ANY_ROOM = {buffers: {"LEAST_ROOM": 0}, fast_paths: {"LEAST_ROOM": 0}}
CLOSED = {assembled: {**SHARED[assembled], "KEPT_BYTES": 0, "MOST_ROOM": 0}}
TURNS = (
    Turn(),
    Turn(1, keeps=False, fill=0),
    Turn(begins=True, patches={**ANY_ROOM, assembled: {**SHARED[assembled], "LEAST_ROOM": 0}}),
    Turn(patches=CLOSED),
)


# ---------------------------------------------------------------------------------------------- inputs

#: rows, inner columns and columns: in this order each history
SIZES = (
    (4, 5, 6), (0, 3, 2), (17, 13, 64), (30, 40, 65), (2, 0, 7), (1, 1, 1), (3, 20, 130), (40, 9, 12), (5, 6, 0),
    (2, 3, 4097), (33, 33, 33), (1, 2, 1),
)  # fmt: skip


def stored(rng: np.random.Generator, m: int, n: int, dtype: str, idtype: str) -> sp.csr_array:
    """A matrix of any pattern with small whole numbers, in arrays of their own."""
    made = drawn(rng, m, n, "float32")
    return with_arrays(rng, made.indptr, made.indices, (m, n), dtype, idtype)


def with_arrays(
    rng: np.random.Generator, indptr: Any, indices: Any, shape: tuple[int, int], dtype: str, idtype: str
) -> sp.csr_array:
    """A matrix with these coordinates."""
    made = sp.csr_array(shape, dtype=dtype)
    made.data = rng.integers(-3, 4, len(indices)).astype(dtype)
    made.indptr, made.indices = (np.array(a, idtype) for a in (indptr, indices))
    return made


def drawn_sizes(seed: int, dtype: str, idtype: str) -> Iterator[tuple[str, Matrices]]:
    """Operands of products and sums: A (m, p), B (p, n), C like A, M (m, n) and S (m, m)."""
    rng = np.random.default_rng(seed)
    for m, p, n in SIZES:
        shapes = {"A": (m, p), "B": (p, n), "C": (m, p), "M": (m, n), "S": (m, m)}
        kinds = {k: "bool" if k == "M" else dtype for k in shapes}
        yield f"{m} x {p} x {n}", {k: stored(rng, *shape, kinds[k], idtype) for k, shape in shapes.items()}


def last_columns(seed: int, dtype: str, idtype: str) -> Iterator[tuple[str, Matrices]]:
    """Rows with as many entries in ever more columns, the last ones, and in few again."""
    rng = np.random.default_rng(seed)
    for n in (40, 400, 40_000, 129):
        columns = np.tile(np.arange(n - 30, n), 3)
        B = with_arrays(rng, 30 * np.arange(4), columns, (3, n), dtype, idtype)
        A = with_arrays(rng, [0, 1, 1, 3], [2, 0, 2], (3, 3), dtype, idtype)
        yield f"the last of {n} columns", {"A": A, "B": B, "C": A, "M": B.astype(np.bool_), "S": A}


def long_rows(seed: int, dtype: str, idtype: str) -> Iterator[tuple[str, Matrices]]:
    """Rows with more products than columns, of more columns than a segment has, and of fewer."""
    rng = np.random.default_rng(seed)
    for count, n in ((2, 66_000), (14, 600), (1, 9000), (3, 66_000)):
        B = with_arrays(rng, n * np.arange(count + 1), np.tile(np.arange(n), count), (count, n), dtype, idtype)
        A = with_arrays(rng, [0, count, count], np.arange(count), (2, count), dtype, idtype)
        M = with_arrays(rng, [0, 2, 4], [n - 1, 0, 1, n - 1], (2, n), "bool", idtype)
        yield f"{count} full rows of {n} columns", {"A": A, "B": B, "C": A, "M": M, "S": A[:, :2].tocsr()}


# ---------------------------------------------------------------------------------------------- oracles


def dense(matrix: Any) -> tuple[Dense, Dense]:
    """Elements in a wide dtype, and where there are any; those with the same coordinates add up."""
    kind = np.float64 if matrix.dtype.kind == "f" else np.int64
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    found = np.zeros(matrix.shape, kind), np.zeros(matrix.shape, np.bool_)
    np.add.at(found[0], (rows, matrix.indices), matrix.data)
    found[1][rows, matrix.indices] = True
    return found


def product(A: Any, B: Any) -> tuple[Dense, Dense]:
    """The same of a product."""
    wide = np.float64 if A.dtype.kind == "f" else np.int64
    left, right = (sp.csr_array((x.data.astype(wide), x.indices, x.indptr), shape=x.shape) for x in (A, B))
    ones = [sp.csr_array((np.ones(x.nnz), x.indices, x.indptr), shape=x.shape) for x in (A, B)]
    return (left @ right).toarray(), (ones[0] @ ones[1]).toarray() > 0


def largest(values: Dense, kept: Dense, top: int) -> Dense:
    """Where the largest elements of each row are, the first of equal ones."""
    found = np.zeros_like(kept)
    for row in range(len(kept)):
        columns = np.flatnonzero(kept[row])
        found[row, columns[np.argsort(-values[row, columns], kind="stable")[:top]]] = True
    return found


def compare(found: Any, expected: tuple[Dense, Dense]) -> None:
    """Raise where a matrix is not what it should be."""
    values, kept = expected
    assert found.shape == kept.shape, f"shape {found.shape}, expected {kept.shape}"
    check_sorted(found)
    where = dense(found)[1]
    assert np.array_equal(where, kept), f"other coordinates: {np.argwhere(where != kept)[:5].tolist()}"
    wrong = (found.toarray() != values.astype(found.dtype)) & kept
    assert not wrong.any(), f"other values: {np.argwhere(wrong)[:5].tolist()}"


# ---------------------------------------------------------------------------------------------- cases


class Place:
    """Where a case stands, which a child tells before every call; calls are made between fences."""

    def __init__(self, tell: Callable[[str], None], fences: Everything) -> None:
        self.tell, self.fences = tell, fences

    def turns(self, turns: tuple[Turn, ...] = TURNS) -> Iterator[Turn]:
        """Each turn, while it lasts."""
        for turn in turns:
            with turn.taken(self.fences):
                yield turn

    def call(self, what: str, function: Callable[..., Any], *given: Any) -> Any:
        """What a function returns for copies of arguments that are fenced."""
        self.tell(what)
        with self.fences.within():
            return function(*copy.deepcopy(given))


Make = Callable[[Place], None]
CASES_MADE = itertools.count()
Inputs = tuple[Callable[[int, str, str], Iterator[tuple[str, Matrices]]], ...]


@cache
def inputs_of(kind: Any, seed: int, *types: str) -> list[tuple[str, Matrices]]:
    """The same for several cases."""
    return list(kind(seed, *types))


def over(
    call: Callable[[Matrices], Any],
    expected: Callable[[Matrices], Any],
    types: tuple[str, str],
    *,
    names: str = "AB",
    inputs: Inputs = (drawn_sizes, last_columns),
    turns: tuple[Turn, ...] = TURNS,
) -> Make:
    """A function of matrices with some names, compared with an oracle.

    The first turn calls it with all inputs, the others with one half and the other: neighbours begin with another one.
    """
    begin = next(CASES_MADE)

    def case(place: Place) -> None:
        made = [item for kind in inputs for item in inputs_of(kind, len(names), *types)]
        history = [(what, {n: given[n] for n in names}, expected(given)) for what, given in made]
        for n, turn in enumerate(place.turns(turns)):
            for what, given, right in history if FULL or n == 0 else history[(begin + n) % 2 :: 2]:
                found = place.call(f"{what}, {turn}", call, given)
                if isinstance(right, tuple):
                    compare(found, right)
                else:
                    assert found == right, f"{found}, expected {right}"

    return case


def masked(given: Matrices, *, complement: bool) -> tuple[Dense, Dense]:
    values, kept = product(given["A"], given["B"])
    return values, kept & (dense(given["M"])[1] != complement)


def accumulated() -> Iterator[tuple[str, Make]]:
    """Products, plain, under a mask, outside of it, and the largest entries of each row, collected in every way."""
    names = ("spgemm", "mask", "complement", "top")
    ways = pairwise(names, KINDS, ORDERS, (False, True), (0, 24), (0, 8, 96), TYPES[:3])
    for name, kind, order, counted, insertion, ranked, types in ways:
        way = Accumulators(insertion, kind, counted, order, ranked=ranked)
        yield f"{name} {types[0]} {types[1]} {way}", collected(name, way, types)


def collected(name: str, way: Accumulators, types: tuple[str, str]) -> Make:
    """The case of one way."""
    is_masked = name in ("mask", "complement")
    inputs: Inputs = (drawn_sizes, last_columns, *([long_rows] if way.kind == "segments" else []))

    def case(place: Place) -> None:
        place.tell("compiled")
        program = ops.masked_spgemm if is_masked else ops.spgemm
        options = AccumulatorOptions(complement=name == "complement", select=name == "top", accumulators=way)
        kernel = kernel_factory.assembled_kernel(program(types[0], idtype=types[1]), None, options)

        def call(given: Matrices) -> Any:
            return kernel(**given, **({"top": 3} if name == "top" else {}))

        def expected(given: Matrices) -> tuple[Dense, Dense]:
            if is_masked:
                return masked(given, complement=name == "complement")
            values, kept = product(given["A"], given["B"])
            return values, largest(values, kept, 3) if name == "top" else kept

        over(call, expected, types, names="ABM" if is_masked else "AB", inputs=inputs)(place)

    return case


def small_room(given: Matrices) -> dict[Any, dict[str, Any]]:
    """Room for no more than the small product of these matrices enters."""
    A, B = given["A"], given["B"]
    entered = int(np.diff(B.indptr)[A.indices].sum())
    chunks = max(1, min(sparsetir.get_num_threads(), A.shape[0])) if fast_paths.SHARED_WORK < 0 else 1
    limits = (entered + chunks * ROWS_AHEAD, 1 << 16)
    return {fast_paths: {"limits": lambda: limits}, products: {"limits": lambda: limits}}


def functions() -> Iterator[tuple[str, Make]]:
    """The functions of the package that take matrices."""
    large = {module: {"limits": lambda: (0, -1)} for module in (fast_paths, products)}
    wide = tuple(Turn(t.threads, t.keeps, t.begins, t.fill, {**t.patches, **large}) for t in TURNS)
    matmul = sparsetir.matmul

    def tight(call: Callable[[Matrices], Any]) -> Callable[[Matrices], Any]:
        def called(given: Matrices) -> Any:
            with contextlib.ExitStack() as stack:
                for module, values in small_room(given).items():
                    stack.enter_context(mock.patch.multiple(module, **values))
                return call(given)

        return called

    calls: dict[str, tuple[Callable[[Matrices], Any], Callable[[Matrices], Any]]] = {
        "matmul": (lambda g: matmul(g["A"], g["B"]), lambda g: product(g["A"], g["B"])),
        "matmul with a mask": (
            lambda g: matmul(g["A"], g["B"], mask=g["M"]),
            lambda g: masked(g, complement=False),
        ),
        "matmul with a complement": (
            lambda g: matmul(g["A"], g["B"], mask=g["M"], complement=True),
            lambda g: masked(g, complement=True),
        ),
        "matmul with a top": (lambda g: matmul(g["A"], g["B"], top=2), lambda g: topped(product(g["A"], g["B"]), 2)),
        "matmul with a top and a mask": (
            lambda g: matmul(g["A"], g["B"], mask=g["M"], top=1),
            lambda g: topped(masked(g, complement=False), 1),
        ),
    }
    for n, (name, (call, expected)) in enumerate(calls.items()):
        types = TYPES[n % len(TYPES)]
        names = "ABM" if "mask" in name or "complement" in name else "AB"
        yield f"{name} {types}, small", over(tight(call), expected, types, names=names)
        yield f"{name} {types}, large", over(call, expected, types, names=names, turns=wide)
    rap = lambda g: (dense_of(g["S"]) @ dense_of(g["A"]) @ dense_of(g["B"]), chain(g["S"], g["A"], g["B"]))  # noqa: E731
    yield "rap", over(lambda g: sparsetir.rap(g["S"], g["A"], g["B"]), rap, TYPES[1], names="SAB", turns=wide)
    planned = lambda g: sparsetir.matmul_plan(g["A"], g["B"])(g["A"], g["B"])  # noqa: E731
    yield "matmul_plan", over(planned, lambda g: product(g["A"], g["B"]), TYPES[0])
    for n, (name, of) in enumerate({"add": np.add, "multiply": np.multiply, "maximum": np.maximum}.items()):
        yield f"{name}", over(*merged(name, of), TYPES[n], names="AC")
    yield "triangles", over(lambda g: sparsetir.triangles(g["S"]), triangles, TYPES[0], names="S")
    for n, of in enumerate((both_ways, below)):
        sorted_rows = lambda g, of=of: sparsetir.triangles(of(g["S"]))  # noqa: E731
        yield f"triangles stored {of.__name__}", over(sorted_rows, triangles, TYPES[n], names="S")


def topped(expected: tuple[Dense, Dense], top: int) -> tuple[Dense, Dense]:
    return expected[0], largest(*expected, top)


def dense_of(matrix: Any) -> Dense:
    return dense(matrix)[0]


def chain(*factors: Any) -> Dense:
    """Where a product of several matrices has elements."""
    found = dense(factors[0])[1].astype(np.int64)
    for factor in factors[1:]:
        found = (found @ dense(factor)[1] > 0).astype(np.int64)
    return found > 0


def merged(name: str, of: Any) -> tuple[Callable[[Matrices], Any], Callable[[Matrices], Any]]:
    """A function of two matrices of one shape, and its oracle."""

    def expected(given: Matrices) -> tuple[Dense, Dense]:
        (a, in_a), (b, in_b) = dense(given["A"]), dense(given["C"])
        return of(a, b), in_a & in_b if name == "multiply" else in_a | in_b

    return lambda given: getattr(sparsetir, name)(given["A"], given["C"]), expected


def undirected(matrix: Any) -> Dense:
    found = dense(matrix)[1]
    found = found | found.T
    np.fill_diagonal(found, False)
    return found.astype(np.int64)


def triangles(given: Matrices) -> int:
    found = undirected(given["S"])
    return int(np.trace(found @ found @ found)) // 6


def both_ways(matrix: Any) -> sp.csr_array:
    return sp.csr_array(undirected(matrix).astype("float32"))


def below(matrix: Any) -> sp.csr_array:
    return sp.csr_array(np.tril(undirected(matrix)).astype("float32"))


def programs() -> Iterator[tuple[str, Make]]:
    """Programs of the corpus: those that compute patterns, and a share of the others."""
    for name in PROGRAMS:
        yield name, computed(name)
    share = 1 if FULL else 12
    tensors = [p for p in CASES if p.name.startswith(("ttv_3d", "mttkrp_3d", "scratch", "power_iteration"))]
    for n, program in enumerate([*tensors, *(p for p in CASES[::share] if p not in tensors)]):
        yield program.name, stage_one(program, TYPES[n % 2])


def computed(name: str) -> Make:
    """A program that computes a pattern, whose turns give the same."""

    def case(place: Place) -> None:
        place.tell("compiled")
        kernel, first = sparsetir.build(sparsetir.parse(PROGRAMS[name])), {}
        inputs = {(s, d): draw_arguments(name, s, d) for s in SHAPES for d in (0, 0.5)}

        def assembled_of(given: dict[str, Any]) -> Any:
            return kernel.assemble(kernel.prepare((), given))

        for turn in place.turns():
            for (shape, density), given in inputs.items():
                found = place.call(f"{shape}, density {density}, {turn}", assembled_of, given)
                held = [a.tobytes() for a in (found.indptr, found.keys, *found.values)]
                assert held == first.setdefault((shape, density), held), "not what it was in the first turn"

    return case


def stage_one(program: Program, types: tuple[str, str]) -> Make:
    """A program that computes values."""
    dtype = types[0] if types[0] in program.dtypes else program.dtypes[0]

    def case(place: Place) -> None:
        place.tell("compiled")
        func = program.make(dtype, types[1])
        kernel = sparsetir.build(func)
        inputs = {kind: draw(program, kind, dtype, types[1]) for kind in program.kinds}
        for turn in place.turns(TURNS[:3]):
            for kind, given in inputs.items():
                found = place.call(f"{kind}, {turn}", lambda args: run(program, kernel, args), given)
                check(program, func, dtype, found, given)

    return case


def stored_otherwise() -> Iterator[tuple[str, Make]]:
    """Products with dense matrices and vectors, and sampled ones, over formats."""
    chosen = [
        formats.csc(), formats.ell(), formats.hyb(2, (1, 2, 4)), formats.bsr(2, 2), formats.dcsr(), formats.dia(),
        formats.coo(), formats.sell(4), formats.padded_csr(4), formats.narrow_csr(),
    ]  # fmt: skip
    chosen = chosen if FULL else chosen[:6]
    for n, chosen_format in enumerate(chosen):
        name = ("spmm", "spmv", "sddmm")[n % 3]
        yield f"{name} over {chosen_format}", over_format(name, chosen_format, TYPES[n % 2])
    for name in ("spmm", "sddmm"):
        yield f"{name} as stored", over_format(name, None, TYPES[0])


def over_format(name: str, chosen: Any, types: tuple[str, str]) -> Make:
    """A product with dense operands."""
    sparse = "S" if name == "sddmm" else "A"

    def case(place: Place) -> None:
        place.tell("compiled")
        program = getattr(ops, name)(types[0], idtype=types[1])
        if chosen is not None:
            program = sparsetir.decompose_format(program, {sparse: chosen})
        kernel = sparsetir.build(program)
        for turn in place.turns(TURNS[:3]):
            rng = np.random.default_rng(0)
            for m, n, k in SIZES:
                matrix = stored(rng, m, n, *types)
                X, Y = (rng.integers(-3, 4, (rows, k % 40)).astype(types[0]) for rows in (m, n))
                x = rng.integers(-3, 4, n).astype(types[0])
                values = dense_of(matrix)
                given, right = {
                    "spmm": ({"A": matrix, "B": Y}, values @ Y),
                    "spmv": ({"A": matrix, "x": x}, values @ x),
                    "sddmm": ({"S": matrix, "X": X, "Y": Y}, values * (X @ Y.T)),
                }[name]
                found = place.call(f"{m} x {n} x {k % 40}, {turn}", lambda args: kernel(**args), given)
                found = found.toarray() if name == "sddmm" else found
                assert np.array_equal(found, right), f"{np.argwhere(found != right)[:5].tolist()} differ"

    return case


GROUPS: dict[str, Callable[[], Iterator[tuple[str, Make]]]] = {
    "accumulators": accumulated,
    "functions": functions,
    "programs": programs,
    "formats": stored_otherwise,
}

#: by which a test sees that faults are found
FAULTS: dict[str, Callable[[], Iterator[tuple[str, Make]]]] = {"faults": lambda: iter(FAULTY.items())}
FAULTY: dict[str, Make] = {
    "a step too far": lambda place: place.call("a call", lambda a: ctypes.string_at(a.ctypes.data, 73), np.ones(9)),
    "another result": over(lambda g: g["A"], lambda g: dense(g["C"]), TYPES[0], names="AC", turns=TURNS[:1]),
    "no fault": lambda place: place.call("a call", np.sum, np.ones(9)),
}


# ---------------------------------------------------------------------------------------------- children


def serve() -> None:
    """Run a child for each request, a line of JSON, and tell its exit status: all have the imports of this process."""
    os.environ.pop("LD_PRELOAD", None)  # the fences are for these processes
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            child(**json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def child(group: str, first: int, most: int, folder: str) -> None:
    """Run the cases of a group and write a line of JSON before each call; exceptions are reported and passed over."""
    out = Path(folder, "said").open("w", buffering=1, encoding="utf-8")
    with Path(folder, "errors").open("wb") as errors:
        for standard in (1, 2):
            os.dup2(errors.fileno(), standard)
    fences = Everything()
    faulthandler.enable()
    signal.alarm(SECONDS)

    def tell(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")

    with contextlib.nullcontext() if FULL else quick_code():
        for number, (name, case) in enumerate({**GROUPS, **FAULTS}[group]()):
            if not first <= number < most:
                continue
            tell(case=number, name=name)
            try:
                case(Place(lambda text: tell(at=text), fences))
            except Exception as error:
                tell(wrong="".join(traceback.format_exception(error))[-3000:])
    tell(done=True, fenced=fences.made)


@dataclass
class Outcome:
    """What became of a group: the cases by name, what went wrong, and how many blocks were fenced."""

    cases: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    fenced: list[int] = field(default_factory=lambda: [0, 0])


def outcome(group: str, *, most: int = 1 << 30, most_deaths: int = 5) -> Outcome:
    """Run a group in children; where one dies another one goes on with the next case."""
    found, first = Outcome(), 0
    for _ in range(most_deaths):
        facts, status, errors = said_by_child(group, first, most)
        name, at = "before the first case", ""
        for fact in facts:
            if "name" in fact:
                name, first = fact["name"], fact["case"] + 1
                found.cases.append(name)
            at = fact.get("at", at)
            if "wrong" in fact:
                found.failures.append(f"{group}, {name}: {at}\n{fact['wrong']}")
        if facts and "done" in facts[-1]:
            found.fenced = facts[-1]["fenced"]
            return found
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        found.failures.append(f"{group}, {name} died of {how}: {at}\n{errors[:3000]}")
    return found


def said_by_child(group: str, first: int, most: int) -> tuple[list[dict[str, Any]], int, str]:
    """What a child says, its exit status, and what it wrote to its standard error."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = server()
        asked.write(json.dumps({"group": group, "first": first, "most": most, "folder": folder}) + "\n")
        asked.flush()
        status = int(told.readline())
        said, errors = (Path(folder, name).read_text(encoding="utf-8") for name in ("said", "errors"))
    return [json.loads(line) for line in said.splitlines()], status, errors


@cache
def server() -> tuple[IO[str], IO[str]]:
    """Where to ask a process for children, and where it tells what became of them; it ends with this one."""
    env = {**os.environ, **(environment() or {})}
    command, pipe = [sys.executable, __file__, "--serve"], subprocess.PIPE
    made = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
    assert made.stdin is not None
    assert made.stdout is not None
    atexit.register(made.wait)
    atexit.register(made.stdin.close)
    return made.stdin, made.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=[*GROUPS, *FAULTS, "all"], default="all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    count = 0
    for group in GROUPS if given.group == "all" else [given.group]:
        found = outcome(group)
        count += len(found.failures)
        print(*found.failures, f"{group}: {len(found.cases)} cases, {found.fenced} blocks", sep="\n")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
