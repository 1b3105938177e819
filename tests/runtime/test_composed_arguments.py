# SPDX-License-Identifier: Apache-2.0
"""Kernels over other formats speak of the caller's arguments: no array or size of a piece is in an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import on, share
from fuzzing.histories import ADD
from sparsetir import formats, ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from tests.quick_code import quick_code

FORMATS = {
    "ell": formats.ell,
    "coo": formats.coo,
    "sell": lambda: formats.sell(2),
    "hyb": lambda: formats.hyb(1, (1, 2)),
}


def matrix(seed: int = 0, m: int = 4, n: int = 6) -> sp.csr_array:
    return sp.random_array((m, n), density=0.5, format="csr", dtype="float32", rng=np.random.default_rng(seed))


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, "float32")


#: programs with the decomposed buffer, arguments and results
PROGRAMS: dict[str, tuple[Callable[[], Any], str, dict[str, Any], dict[str, Any]]] = {
    "spmm": (ops.spmm, "A", {"A": matrix(), "B": ones(6, 2)}, {"C": ones(4, 2)}),
    "sddmm": (ops.sddmm, "S", {"S": matrix(), "X": ones(4, 2), "Y": ones(6, 2)}, {"O": matrix()}),
    "add": (lambda: sparsetir.parse(ADD), "A", {"A": matrix(), "B": matrix()}, {"C": matrix()}),
}
WRONG = {
    "None": None, "a vector": ones(5), "a matrix": ones(5, 3), "float64": np.ones((6, 2)), "wider": matrix(1, 5, 7),
    "another structure": matrix(9), "empty": sp.csr_array((0, 0), dtype="float32"), "double": matrix().astype("f8"),
    "broadcast": np.broadcast_to(np.float32(0), (4, 2)),
}  # fmt: skip
CASES = [(program, format) for program in PROGRAMS for format in FORMATS]


@cache
def kernel(program: str, format: str) -> Any:
    """The program over the format, compiled once."""
    make, buffer, _, _ = PROGRAMS[program]
    return sparsetir.build(sparsetir.decompose_format(make(), {buffer: FORMATS[format]()}))


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_code():
        yield


def inner_names(kernel: Any) -> set[str]:
    """The names of arrays, sizes and axes that only the compiled program has."""
    programs = [kernel.kernel.signature, kernel.signature]
    inner, outer = ({*s.by_name, *s.buffers, *(axis.name for axis in s.program.axes.values())} for s in programs)
    return inner - outer - set(re.findall(r"\w+", repr(kernel)))


def variants(program: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of which one is missing or wrong."""
    _, _, inputs, results = PROGRAMS[program]
    yield "nothing", {}
    for name in inputs:
        yield f"without {name}", {n: v for n, v in inputs.items() if n != name}
    for name in (*inputs, *results):
        yield from ((f"{name} is {what}", {**inputs, name: value}) for what, value in WRONG.items())
    yield from ((f"{size} = {value}", {**inputs, size: value}) for size in ("m", "n") for value in (-1, 5))


def ways(kernel: Any, arguments: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every way to call a kernel: at once, timed, with no, one or two arguments bound."""
    yield "called", lambda: kernel(**arguments)
    yield "timed", lambda: kernel.time(seconds=0, **arguments)
    for bound in (names for count in range(3) for names in combinations(arguments, count)):
        fixed = {name: arguments[name] for name in bound}
        others = {name: value for name, value in arguments.items() if name not in bound}
        yield f"{bound} bound", lambda fixed=fixed, others=others: kernel.bind(**fixed)(**others)
        yield f"{bound} timed", lambda fixed=fixed, others=others: kernel.bind(**fixed).time(seconds=0, **others)


def message(call: Callable[[], Any]) -> str:
    """The text of the error of a call; of another library's it says so."""
    try:
        call()
    except SparseTIRError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    return ""


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize(("program", "format"), CASES)
def test_errors_speak_of_the_arguments_of_the_caller(program: str, format: str) -> None:
    compiled, errors = kernel(program, format), 0
    names = inner_names(compiled)
    assert names
    for at, (what, arguments) in enumerate(variants(program)):
        for way, call in share(ways(compiled, arguments), 8, first=at):
            with on(f"{what}, {way}"):
                text = message(call)
                errors += bool(text)
                assert not names & set(re.findall(r"\w+", text)), text
    assert errors > 10


@pytest.mark.parametrize("format", FORMATS)
def test_structures_differ_in_any_order_of_arguments(format: str) -> None:
    compiled = kernel("add", format)
    A = sp.csr_array(np.eye(3, dtype="float32"))
    B = sp.csr_array(np.eye(3, dtype="float32")[::-1].copy())
    for arguments in ({"A": A, "B": B}, {"B": B, "A": A}):
        for way, call in ways(compiled, arguments):
            with on(f"{list(arguments)}, {way}"), pytest.raises(ArgumentError, match="share axes but have different"):
                call()


def test_shared_memory_is_that_of_the_argument() -> None:
    A = matrix()
    compiled, out = kernel("spmm", "coo"), A.data[:8].reshape(4, 2)
    for way, call in ways(compiled, {"A": A, "B": ones(6, 2), "C": out}):
        with on(way), pytest.raises(ArgumentError, match=r"^C and A share memory, and C is written"):
            call()


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_is_passed_once(program: str) -> None:
    compiled, (_, _, inputs, _) = kernel(program, "ell"), PROGRAMS[program]
    plain = sparsetir.build(PROGRAMS[program][0]())
    for name, value in inputs.items():
        for one in (compiled, plain):
            bound = one.bind(**{name: value})
            for call in (bound, bound.time):
                with pytest.raises(ArgumentTypeError, match=f"{name} is fixed by bind"):
                    call(**inputs)


def test_threads_are_told_of_their_own_arguments() -> None:
    compiled, (_, _, inputs, _) = kernel("spmm", "ell"), PROGRAMS["spmm"]
    bound, texts = compiled.bind(), []

    def call(called: Callable[..., Any], names: str) -> None:
        given = {name: inputs[name] for name in names}
        texts.extend((names, message(lambda: called(**given))) for _ in range(50))

    threads = [threading.Thread(target=call, args=(c, names)) for c in (compiled, bound) for names in ("AB", "B", "A")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 300
    assert set(texts) == {("AB", ""), ("B", "missing argument A"), ("A", "missing argument B")}
