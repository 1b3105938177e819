# SPDX-License-Identifier: Apache-2.0
"""Random programs over random formats mean what they meant: the interpreter on both, no machine code.

A drawn program has a structure of entries, perhaps repeated ones, dense or sparse axes beside it, an initialisation and
one or two statements. What depends on the order of entries must be refused when it is rewritten, what needs each of
several entries with the same coordinates when such come; nothing else may be. ``SPARSETIR_EXAMPLES=5000`` draws more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsetir
from decomposing import FORMATS, compiled, made, parsed, program
from sparsetir import CooTensor
from sparsetir.errors import StructureError, VerifyError
from sparsetir.runtime.composed import ComposedKernel

THOROUGH = "SPARSETIR_EXAMPLES" in os.environ
drawn = settings(
    max_examples=int(os.environ.get("SPARSETIR_EXAMPLES", "30")),
    deadline=None,
    derandomize=not THOROUGH,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # the programs are small as they are
)

#: how the axes I and J of the entries are declared, and their index arrays
STRUCTURES = {
    "csr": ("I = T.dense_fixed(m)", "J = T.sparse_variable(I, (n, nnz), (ip, iq), sorted=False, unique={unique})"),
    "csc": ("J = T.dense_fixed(n)", "I = T.sparse_variable(J, (m, nnz), (ip, iq), sorted=False, unique={unique})"),
    "coo": ("I = T.sparse_fixed(None, (m, nnz), iq, sorted=False, unique=False)", "J = T.singleton(I, n, ip)"),
}

#: axes beside the structure: their names, their declarations
BESIDE = {
    "dense": (("K",), ("K = T.dense_fixed(nk)",)),
    "sparse": (("X",), ("X = T.sparse_variable(None, (nx, zx), (px, qx))",)),
    "rows": (("U", "V"), ("U = T.dense_fixed(nu)", "V = T.sparse_variable(U, (nv, zv), (pv, qv))")),
}
SIDE = {"dense": "F[k]", "sparse": "F[x]", "rows": "F[u, v]"}
LENGTH = {"i": "m", "j": "n", "k": "nk", "x": "nx", "u": "nu", "v": "nv"}

#: statements by what they need: Y[{y}] is the result, {t} a term that is linear in the entry's value
FREE = {
    "sum": ["Y[{y}] = Y[{y}] + {t}"],
    "sums": ["Y[{y}] = Y[{y}] + {t}", "Z[0] = Z[0] + A[i, j]"],
    "difference": ["Y[{y}] = Y[{y}] - {t}"],
    "scratch": ["O[i, j] = A[i, j] * 2.0", "Y[{y}] = Y[{y}] + O[i, j]"],
    "seen": ["Z[0] = 5.0", "Y[{y}] = Y[{y}] + {t}"],
    "own": ["O[i, j] = A[i, j] * 3.0"],
    "under a condition": ["if i > 0:\n    Y[{y}] = Y[{y}] + {t}"],
    "inner loop": ["for l in range(2):\n    Y[{y}] = Y[{y}] + {t}"],
}
EACH = {  # right in any order, but not of sums
    "max": ["Y[{y}] = T.max(Y[{y}], {t})"],
    "min": ["Y[{y}] = T.min(Y[{y}], {t} + 1.0)"],
    "count": ["Y[{y}] = Y[{y}] + 1.0"],
    "square": ["Y[{y}] = Y[{y}] + A[i, j] * A[i, j]"],
    "map": ["O[i, j] = A[i, j] * {t} + T.cast(j, 'float64')"],
    "two maps": ["O[i, j] = A[i, j] + 1.0", "P[i, j] = O[i, j] * A[i, j]"],
    "dense map": ["D[i, j] = A[i, j] - 4.0", "Y[{y}] = Y[{y}] + D[i, j]"],
}
ORDERED = {  # the result of one entry needs another
    "last": ["Z[0] = A[i, j]"],
    "partial": ["Z[0] = T.max(Z[0], A[i, j])", "Y[{y}] = Y[{y}] + Z[0]"],
    "horner": ["Z[0] = Z[0] * 2.0 + A[i, j]"],
    "shifted": ["D[i, j] = D[i, j] + A[i, j]", "Y[{y}] = Y[{y}] + D[i, j + 1]"],
}
BODIES = {**FREE, **EACH, **ORDERED}


@dataclass(frozen=True)
class Drawn:
    """A program, its arguments as they are stored, the entries of A, and the name of its body."""

    text: str
    args: dict[str, Any]
    tensor: CooTensor
    body: str

    @property
    def repeats(self) -> bool:
        """Whether several entries have the same coordinates."""
        return len(set(zip(*self.tensor.coords.tolist(), strict=True))) < len(self.tensor.values)

    @property
    def over_entries(self) -> list[str]:
        """Buffers over the entries that the program uses."""
        return [name for name in "AOP" if f"{name}[" in self.text or name == "A"]


def _some(draw: Any, length: int) -> np.ndarray:
    """Some of the coordinates of an axis, in order."""
    most = max(length - 1, 0)
    return np.array(sorted(draw(st.sets(st.integers(0, most), max_size=length))), "int32")


def _values(draw: Any, count: int) -> np.ndarray:
    return np.array(draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count)), "float64")


def _rows(draw: Any, names: str, count: int, length: int) -> dict[str, Any]:
    """Row pointers, indices and their number, of some coordinates for each of `count` rows."""
    fibers = [_some(draw, length) for _ in range(count)]
    held = np.concatenate([np.zeros(0, "int32"), *fibers])
    pointers = np.cumsum([0, *map(len, fibers)]).astype("int32")
    return {f"p{names}": pointers, f"q{names}": held, f"z{names}": len(held)}


def _entries(draw: Any, m: int, n: int, unique: bool) -> tuple[np.ndarray, np.ndarray]:
    at = st.tuples(st.integers(0, max(m - 1, 0)), st.integers(0, max(n - 1, 0)))
    found = draw(st.lists(at, max_size=9 if m * n else 0, unique=unique))
    return np.array(found, "int32").reshape(-1, 2).T, _values(draw, len(found))


def _stored(kind: str, coords: np.ndarray, m: int, n: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The order in which a structure stores the entries, and its index arrays."""
    if kind == "coo":
        return np.arange(coords.shape[1]), {"iq": coords[0], "ip": coords[1]}
    major, count = (0, m) if kind == "csr" else (1, n)
    order = np.argsort(coords[major], kind="stable")
    pointers = np.searchsorted(coords[major][order], np.arange(count + 1)).astype("int32")
    return order, {"ip": pointers, "iq": coords[1 - major][order]}


def _text(structure: list[str], side: str | None, letters: dict[str, str], kept: list[str], body: list[str]) -> str:
    """A function whose iteration has the axes and letters of `letters` and the lines `body`."""
    results = [f"Y{n}" for n in range(len(kept))]
    declared = [*structure, *(BESIDE[side][1] if side else ()), "ONE = T.dense_fixed(1)"]
    declared += [f"{name} = T.dense_fixed({LENGTH[v]})" for name, v in zip(results, kept, strict=True)]
    declared += ["DU = T.dense_fixed(m)", "DV = T.dense_fixed(n)", "LV = T.sparse_variable(DU, (n, zl), (pl, ql))"]
    buffers = {"A": "I, J", "O": "I, J", "P": "I, J", "Z": "ONE", "D": "DU, DV", "L": "DU, LV"}
    buffers["Y"] = ", ".join(["ONE", *results])
    buffers |= {"F": ", ".join(BESIDE[side][0])} if side else {}
    arrays = [*map(str.lower, buffers), *"ip iq pl ql".split()]
    arrays += {"sparse": ["px", "qx"], "rows": ["pv", "qv"]}.get(side or "", [])
    params = [f"{a}: T.handle" for a in arrays]
    params += [f"{s}: T.int32" for s in (*LENGTH.values(), "nnz", "zl", "zx", "zv")]
    lines = [f"@T.prim_func\ndef func({', '.join(params)}):", *declared]
    for name, axes in buffers.items():
        options = "'float64', default_value=2.0" if name == "L" else "'float64'"
        lines.append(f"{name} = T.match_sparse_buffer({name.lower()}, ({axes},), {options})")
    listed, kinds = ", ".join(letters), "".join(letters.values())
    lines.append(f"with T.sp_iter([{listed}], {kinds!r}, 'work') as [{listed.lower()}]:")
    return "\n    ".join([*lines, *(f"    {line}" for line in body)])


@st.composite
def programs(draw: Any) -> Drawn:
    """A program over a structure of entries, with a side axis or two, and its arguments."""
    kind, unique = draw(st.sampled_from(sorted(STRUCTURES))), draw(st.booleans())
    side = draw(st.none() | st.sampled_from(sorted(BESIDE)))
    sizes = {name: draw(st.integers(0 if name in "mn" else 1, 4)) for name in LENGTH.values()}
    m, n = sizes["m"], sizes["n"]

    axes = [*(BESIDE[side][0] if side else ()), *("JI" if kind == "csc" else "IJ")]
    axes = axes if draw(st.booleans()) else [*axes[-2:], *axes[:-2]]
    letters = {axis: draw(st.sampled_from("SR")) for axis in axes}
    kept = [a.lower() for a in axes if letters[a] == "S" and draw(st.integers(0, 3))]
    lookup = draw(st.sampled_from(["1.0", "L[i, j]", "L[j, i]", "L[i + 1, j - 1]", "L[i + j, i * 2]"]))
    names = {"y": ", ".join(["0", *kept])}
    names["t"] = " * ".join(["A[i, j]", lookup, *([SIDE[side]] if side else [])])
    chosen = draw(st.sampled_from(sorted(BODIES)))
    body = "\n".join(BODIES[chosen]).format(**names)
    if "Y[" in body and draw(st.booleans()):
        body = f"with T.init():\n    Y[{names['y']}] = {draw(st.integers(-2, 2))}\n{body}"
    structure = [line.format(unique=unique) for line in STRUCTURES[kind]]
    text = _text(structure, side, letters, kept, body.splitlines())

    coords, values = _entries(draw, m, n, unique)
    order, arrays = _stored(kind, coords, m, n)
    args: dict[str, Any] = {**sizes, **arrays, "nnz": len(values), "a": values[order], **_rows(draw, "l", m, n)}
    held = sizes["nk"]
    if side in ("sparse", "rows"):
        args |= _rows(draw, "x", 1, sizes["nx"]) if side == "sparse" else _rows(draw, "v", sizes["nu"], sizes["nv"])
        held = args["zx" if side == "sparse" else "zv"]
    args |= {"f": _values(draw, held)} if side else {}
    args |= {"l": _values(draw, args["zl"]), "z": np.array([7.0]), "d": np.full((m, n), 9.0)}
    args |= {"y": np.full([1, *(sizes[LENGTH[v]] for v in kept)], 8.0), **{b: _values(draw, len(values)) for b in "op"}}
    return Drawn(text, args, CooTensor(coords[:, order], values[order], (m, n)), chosen)


# ---------------------------------------------------------------- the check


def check(drawing: Drawn, format: Any) -> None:
    """The program over a format does what it does as it was written, or is refused where it must be."""
    func = parsed(drawing.text)
    if drawing.body in ORDERED:
        with pytest.raises(VerifyError, match=r"for other entries too|of which the last one counts"):
            sparsetir.decompose_format(func, {"A": format})
        return
    parts = sparsetir.decompose_format(func, {"A": format})
    tensor, kernel = drawing.tensor, ComposedKernel(parts)
    held = {name: CooTensor(tensor.coords, drawing.args[name.lower()], tensor.shape) for name in drawing.over_entries}
    if drawing.repeats and drawing.body in EACH:
        with pytest.raises(StructureError, match=r"uses each of them \(axis . has unique=False\)"):
            kernel.pieces(**held)
        return
    given = {**{n: v for n, v in drawing.args.items() if n not in ("a", "o", "p")}, **kernel.pieces(**held)}
    known = {str(p.name) for p in parts.func.params}
    expected = sparsetir.interpret(func, drawing.args)
    found = sparsetir.interpret(parts.func, {n: v for n, v in given.items() if n in known})
    shown = f"{drawing.text}\n{drawing.args}\n{sparsetir.script(parts.func)}"
    for name in known & {"y", "z", "d"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} of\n{shown}")
    for name, value in held.items():
        stored = [found[piece.values[name.lower()]] for piece in parts.groups[0].pieces]
        result = kernel.convert(name, value).restore(stored).values
        np.testing.assert_array_equal(
            _dense(tensor, result), _dense(tensor, expected[name.lower()]), err_msg=f"{name} of\n{shown}"
        )


def _dense(tensor: CooTensor, values: np.ndarray) -> np.ndarray:
    out = np.zeros(tensor.shape)
    np.add.at(out, tuple(tensor.coords), values)
    return out


NAMES = sorted(set(FORMATS) - {"nm", "dia", "band"})


@pytest.mark.slow
@drawn
@given(programs(), st.sampled_from(NAMES))
def test_a_program_means_the_same_over_any_format(drawing: Drawn, name: str) -> None:
    check(drawing, made(name))


# ---------------------------------------------------------------- what the drawn programs found

OUTER = """
@T.prim_func
def outer(a: T.handle, b: T.handle, y: T.handle, px: T.handle, ix: T.handle, pu: T.handle, iu: T.handle,
          nx: T.int32, zx: T.int32, m: T.int32, n: T.int32, z: T.int32):
    X = T.sparse_variable(None, (nx, zx), (px, ix))
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, z), (pu, iu))
    DX = T.dense_fixed(nx)
    F = T.match_sparse_buffer(a, (X,))
    A = T.match_sparse_buffer(b, (I, J))
    Y = T.match_sparse_buffer(y, (DX, I))
    with T.sp_iter([X, I, J], "SSR", "outer") as [x, i, j]:
        with T.init():
            Y[x, i] = 1
        Y[x, i] = Y[x, i] + F[x] * A[i, j]
"""


@pytest.mark.parametrize("name", ["bsr", "sell", "hyb", "ell_rest"])
def test_rows_of_a_sparse_axis_beside_are_initialised(name: str) -> None:
    B = sp.csr_array(np.array([[1, 0, 2], [0, 0, 0], [0, 3, 4]], "float32"))
    kernel = compiled(sparsetir.decompose_format(parsed(OUTER), {"A": made(name)}))
    out = np.full((4, 3), 77, "float32")
    kernel(A=B, a=np.array([5], "float32"), px=np.array([0, 1], "int32"), ix=np.array([2], "int32"), nx=4, y=out)
    assert out.tolist() == [[1, 1, 1], [1, 1, 1], [16, 1, 36], [1, 1, 1]]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "Y[0] = A[i, j]",
            "iteration work stores to one element of Y for several entries, of which the last one counts",
        ),
        ("Y[i] = Y[i] * 2.0 + A[i, j]", "iteration work reads Y, which it stores to for other entries too"),
        ("Y[i + 1] = Y[i] + A[i, j]", "reads Y, which it stores to for other entries too: their order would matter"),
    ],
)
def test_results_that_depend_on_the_order_of_entries(statement: str, message: str) -> None:
    func = program("A:I,J Y:I", f"with T.sp_iter([I, J], 'SR', 'work') as [i, j]:\n    {statement}")
    with pytest.raises(VerifyError, match=message):
        sparsetir.decompose_format(func, {"A": made("csc")})


def test_entries_that_are_each_needed() -> None:
    text = program("A:I,J Y:I", "with T.sp_iter([I, J], 'SR', 'top') as [i, j]:\n    Y[i] = T.max(Y[i], A[i, j])")
    func = sparsetir.parse(
        sparsetir.script(text).replace('(indptr, indices), "int32")', "(indptr, indices), unique=False)")
    )
    twice = CooTensor(np.array([[0, 0], [1, 1]]), np.array([2, 3], "float32"), (1, 2))
    assert sparsetir.build(func)(A=twice, Y=np.zeros(1, "float32")).tolist() == [3]
    kernel = compiled(sparsetir.decompose_format(func, {"A": made("ell")}))
    with pytest.raises(StructureError, match=r"A holds 2 entries at 1 coordinates: .*axis J has unique=False"):
        kernel(A=twice, Y=np.zeros(1, "float32"))
    once = CooTensor(np.array([[0, 0], [0, 1]]), np.array([2, 3], "float32"), (1, 2))
    assert kernel(A=once, Y=np.zeros(1, "float32")).tolist() == [3]
