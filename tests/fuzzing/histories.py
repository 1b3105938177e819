# SPDX-License-Identifier: Apache-2.0
"""Random histories of calls, each compared with a fresh kernel.

What came before a call must not change what it gives: results, errors and what is written in place are those of a
kernel that was never called, for arguments of every class, layout and fault, bound and unbound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from fuzzing.arguments import OWN, Item, Memo, dense, numbers, sparse
from sparsetir import formats
from sparsetir.interop import is_half
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.kernel import Kernel

SIZES = {"m": (4, 6), "n": (4, 6), "k": (1, 2)}

ADD = """
@T.prim_func
def add(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J))
    B = T.match_sparse_buffer(b, (I, J))
    C = T.match_sparse_buffer(c, (I, J))
    with T.sp_iter([I, J], "SS", "add") as [i, j]:
        C[i, j] = A[i, j] + B[i, j]
"""
UPDATE = """
@T.prim_func
def update(a: T.handle, b: T.handle, c: T.handle, d: T.handle, indptr: T.handle, indices: T.handle,
           m: T.int32, n: T.int32, nnz: T.int32, k: T.int32, twice: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32", sorted=False, unique=False)
    Jd = T.dense_fixed(n)
    K = T.dense_fixed(k)
    A = T.match_sparse_buffer(a, (I, J))
    B = T.match_sparse_buffer(b, (Jd, K))
    C = T.match_sparse_buffer(c, (I, K))
    D = T.match_sparse_buffer(d, (I, J))
    with T.sp_iter([I, J, K], "SRS", "product") as [i, j, l]:
        C[i, l] = C[i, l] + A[i, j] * B[j, l]
    with T.sp_iter([I, J], "SS", "scaled") as [i, j]:
        D[i, j] = A[i, j] * T.Cast("float32", twice)
"""


@dataclass(frozen=True)
class Subject:
    """A kernel and what its arguments are like.

    Parameters
    ----------
    kernel : Kernel or ComposedKernel
        Never called itself.
    sparse, dense : dict of str to (str, str) or tuple of str
        The arguments with the names of their sizes.
    raw : dict of str to tuple of str
        The names of the arrays of a sparse argument: values, row pointers, indices.
    oracle : callable, optional
        Computes the result of the arguments as dense arrays.
    optional : tuple of str
        Arguments that need not be passed.
    sizes : tuple of str
        That may be passed.
    """

    kernel: Any
    sparse: dict[str, tuple[str, str]]
    dense: dict[str, tuple[str, ...]]
    raw: dict[str, tuple[str, str, str]]
    oracle: Callable[..., np.ndarray] | None = None
    optional: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ("m", "n")
    dtype: str = "float32"
    idtype: str = "int32"
    block: int = 1

    def fresh(self) -> Any:
        """The same kernel without a past."""
        return _fresh(self.kernel)


def _fresh(kernel: Any) -> Any:
    if isinstance(kernel, ComposedKernel):
        return ComposedKernel(
            kernel.decomposition, lambda func, covered: Kernel(func, kernel.kernel.compiled, covered=covered)
        )
    return Kernel(kernel.func, kernel.compiled)


SPMM = ({"A": ("m", "n")}, {"B": ("n", "k"), "C": ("m", "k")})
ARRAYS = {"A": ("a", "indptr", "indices")}
SDDMM = ({"S": ("m", "n"), "O": ("m", "n")}, {"X": ("m", "k"), "Y": ("n", "k")})


def _over(program: Any, **chosen: Any) -> Any:
    return sparsetir.build(sparsetir.decompose_format(program, chosen))


def _product(A: np.ndarray, B: np.ndarray, **_: Any) -> np.ndarray:
    return A @ B


def _sampled(S: np.ndarray, X: np.ndarray, Y: np.ndarray, **_: Any) -> np.ndarray:
    return S * (X @ Y.T)


def _sum(A: np.ndarray, B: np.ndarray, **_: Any) -> np.ndarray:
    return A + B


MAKERS: dict[str, Callable[[], Subject]] = {
    "spmm": lambda: Subject(sparsetir.build(sparsetir.ops.spmm()), *SPMM, ARRAYS, _product, ("C",)),
    "sddmm": lambda: Subject(
        sparsetir.build(sparsetir.ops.sddmm()), *SDDMM, {"S": ("s", "indptr", "indices")}, _sampled, ("O",)
    ),
    "add": lambda: Subject(
        sparsetir.build(sparsetir.parse(ADD)), {n: ("m", "n") for n in "ABC"}, {}, ARRAYS, _sum, ("C",)
    ),
    "update": lambda: Subject(
        sparsetir.build(sparsetir.parse(UPDATE)),
        {"A": ("m", "n"), "D": ("m", "n")},
        SPMM[1],
        ARRAYS,
        None,
        ("D",),
        ("m", "n", "twice"),
    ),
    "bsr": lambda: Subject(
        sparsetir.build(sparsetir.ops.spmm(format="bsr", block=2)), {"A": ("m", "n")}, {}, ARRAYS, block=2
    ),
    "csc": lambda: Subject(
        sparsetir.build(sparsetir.ops.spmm("float64", "csc", idtype="int64")),
        *SPMM,
        ARRAYS,
        _product,
        ("C",),
        dtype="float64",
        idtype="int64",
    ),
    "ell": lambda: Subject(sparsetir.build(sparsetir.ops.spmm(format="ell")), *SPMM, {}, _product, ("C",)),
    "spmm over ell": lambda: Subject(_over(sparsetir.ops.spmm(), A=formats.ell()), *SPMM, {}, _product, ("C",)),
    "sddmm over hyb": lambda: Subject(
        _over(sparsetir.ops.sddmm(), S=formats.hyb(1, (1, 2))), *SDDMM, {}, _sampled, ("O",)
    ),
    "add over bsr": lambda: Subject(
        _over(sparsetir.parse(ADD), A=formats.bsr(2, 2)), {n: ("m", "n") for n in "ABC"}, {}, {}, _sum, ("C",)
    ),
}


@cache
def subject(name: str) -> Subject:
    """Compiled once."""
    return MAKERS[name]()


class Difference(AssertionError):
    """A call gave something else than a fresh kernel."""


class History:
    """Calls of one kernel, and of bound ones, with arguments that come again and change meanwhile.

    Parameters
    ----------
    name : str
        Of the subject.
    random : Random
        Decides everything.
    """

    def __init__(self, name: str, random: Random) -> None:
        self.subject, self.random = subject(name), random
        self.kernel = self.subject.fresh()
        self.usual = {n: random.choice(s) for n, s in SIZES.items()}
        self.pool: dict[str, list[Item]] = {}
        self.bound: list[tuple[Any, dict[str, Any]]] = []
        self.results: list[tuple[Any, Any]] = []
        self.fixed: list[Item] = []
        self.log: list[str] = []

    # ------------------------------------------------------------------ steps

    def step(self) -> str:
        """One step, and what came of it."""
        what = self.random.random()
        if what < 0.08:
            return self.change()
        if what < 0.12:
            return self.spoil()
        if what < 0.2:
            return self.bind()
        return self.call_bound() if what < 0.6 else self.call()

    def call(self) -> str:
        """A call of the kernel itself."""
        return self._compare(self.kernel, self.subject.fresh, self._without_fixed_results(self._arguments()), {})

    def bind(self) -> str:
        """Fix some arguments."""
        if len(self.bound) == 3:
            return "nothing"
        given = self._arguments(plain=0.7)
        names = [n for n in given if self.random.random() < 0.5]
        fixed = self._apart({n: given[n] for n in names})
        memo: Memo = {}
        twins = {n: _twin(v, memo) for n, v in fixed.items()}
        one = _outcome(lambda: self.kernel.bind(**_objects(fixed)))
        other = _outcome(lambda: self.subject.fresh().bind(**_objects(twins)))
        self.log.append(f"bind {_shown(fixed)}")
        if one[:1] != other[:1] or (one[0] == "error" and one != other):
            raise Difference(self._story(one, other))
        if one[0] == "error":
            return "error"
        self.bound.append((one[1], fixed))
        self.fixed += [v for v in fixed.values() if isinstance(v, Item)]
        return "bound"

    def call_bound(self) -> str:
        """A call of a bound kernel, or of the other where there is none."""
        if not self.bound:
            return self.call()
        bound, fixed = self.random.choice(self.bound)
        given = {n: v for n, v in self._arguments(plain=0.5).items() if n not in fixed or self.random.random() < 0.03}
        return self._compare(bound, self.subject.fresh, self._without_fixed_results(given), fixed)

    def _without_fixed_results(self, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out results in the memory of bound arguments: a bound kernel may have a copy of it."""
        fixed = {id(a) for i in self.fixed for a in _roots(i)}
        results = [n for n in given if n in self.subject.optional and isinstance(given[n], Item)]
        taken = {n for n in results if fixed & {id(a) for a in _roots(given[n])}}
        return {n: v for n, v in given.items() if n not in taken}

    def _apart(self, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out results in the memory of arguments that are bound with them."""
        roots = {n: {id(a) for a in _roots(v)} for n, v in given.items() if isinstance(v, Item)}
        results = [n for n in roots if n in self.subject.optional]
        taken = {n for n in results if any(roots[n] & roots[other] for other in roots if other != n)}
        return {n: v for n, v in given.items() if n not in taken}

    def change(self) -> str:
        """Change an argument in place that is not bound."""
        held = {id(a) for i in self.fixed for a in _roots(i)}
        every = [i for items in self.pool.values() for i in items]
        held |= {id(a) for i in every if i.kind not in OWN for a in _roots(i)}
        items = [i for i in every if not held & {id(a) for a in _roots(i)}]
        arrays = [a for i in items for a in i.arrays if a.size and a.flags.writeable]
        if not arrays:
            return "nothing"
        array = self.random.choice(arrays)
        flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel()
        at = self.random.randrange(flat.size)
        other = self.random.randrange(flat.size)
        flat[at], flat[other] = flat[other].copy(), flat[at].copy()
        array[...] = flat.reshape(array.shape)
        self.log.append(f"exchange {at} and {other} of an array of {array.dtype}")
        return "changed"

    def spoil(self) -> str:
        """Change a result in place, as its owner may."""
        own = [(n, r) for n, (r, _) in enumerate(self.results)]
        if not own:
            return "nothing"
        n, result = self.random.choice(own)
        del self.results[n]
        for part in result if isinstance(result, tuple) else (result,):
            if any(part is i.object for items in self.pool.values() for i in items):
                continue
            if isinstance(part, np.ndarray):
                part[...] = 77
            elif sp.issparse(part) and part.format in ("csr", "csc"):
                part.data[::2] = 0
                if part.indices.dtype == part.indptr.dtype and part.indices.dtype.isnative:
                    part.eliminate_zeros()
                part.indices[...] = 0
        self.log.append("spoil a result")
        return "spoiled"

    # ------------------------------------------------------------------ comparing

    def _compare(self, called: Any, fresh: Callable[[], Any], given: dict[str, Any], fixed: dict[str, Any]) -> str:
        memo: Memo = {}
        twins = {n: _twin(v, memo) for n, v in {**fixed, **given}.items()}
        again = {n: twins[n] for n in given}
        kept = {n: _twin(v, memo) for n, v in fixed.items() if n in given}  # passed although it is fixed
        other_fixed = {n: kept.get(n, twins[n]) for n in fixed}
        expected = self._expected(twins | kept)
        one = _outcome(lambda: called(**_objects(given)))
        other = _outcome(lambda: _bound(fresh(), other_fixed)(**_objects(again)))
        self.log.append(
            f"{'bound ' if fixed else ''}call {_shown(given)} -> {one[0]} {one[1] if one[0] == 'error' else ''}"
        )
        arguments = {**fixed, **given}
        if other[0] == "result" and expected is not None and not np.array_equal(_dense(other[1]), expected):
            raise Difference(self._story(_dense(other[1]).tolist(), f"by numpy {expected.tolist()}"))
        seen = _described(one, {n: _object(v) for n, v in arguments.items()})
        wanted = _described(other, {n: _object(twins[n]) for n in arguments})
        after = [v.state() if isinstance(v, Item) else v for v in arguments.values()]
        wanted_after = [twins[n].state() if isinstance(v, Item) else v for n, v in arguments.items()]
        if seen != wanted or after != wanted_after:
            raise Difference(self._story((seen, after), (wanted, wanted_after)))
        for result, before in self.results:
            if _value(result, {}) != before:
                raise Difference(self._story(_value(result, {}), before))
        if one[0] == "error":
            return "error" if one[1].startswith("sparsetir.") else f"foreign {one[1]}"
        parts = one[1] if isinstance(one[1], tuple) else (one[1],)
        if not any(part is _object(v) for part in parts for v in arguments.values()):
            self.results = [*self.results[-3:], (one[1], _value(one[1], {}))]
        return "result"

    def _expected(self, arguments: dict[str, Any]) -> np.ndarray | None:
        """Compute the result by the oracle; None without one, or for arguments that do not fit."""
        names = {*self.subject.sparse, *self.subject.dense} - set(self.subject.optional)
        if self.subject.oracle is None or not names <= arguments.keys():
            return None
        try:
            whole = {name: _whole(arguments[name]) for name in names}
            return self.subject.oracle(**whole).astype(self.subject.dtype)
        except (ValueError, IndexError, TypeError):  # of broken arguments
            return None

    def _story(self, found: Any, wanted: Any) -> str:
        steps = "\n  ".join(self.log)
        return f"{self.subject.kernel!r}\n  {steps}\nfound  {found}\nfresh  {wanted}"

    # ------------------------------------------------------------------ arguments

    def _arguments(self, plain: float = 0.35) -> dict[str, Any]:
        """Arguments of a call, most of which could be right."""
        r, subject = self.random, self.subject
        is_plain = r.random() < plain
        sizes = self.usual if r.random() < 0.85 else {n: r.choice(s) for n, s in SIZES.items()}
        given: dict[str, Any] = {}
        for name, dims in {**subject.sparse, **subject.dense}.items():
            if name in subject.optional and r.random() < 0.7:
                continue
            if not is_plain and r.random() < 0.02:
                continue
            shape = tuple(sizes[d] for d in dims)
            given[name] = self._item(name, shape, is_plain)
        self._by_names(given)
        if subject.block > 1:
            blocks = (sizes["n"] // subject.block, subject.block, sizes["k"])
            given["B"] = self._item("B", blocks, is_plain)
        given |= self._numbers(sizes)
        if not is_plain and r.random() < 0.02:
            given["unknown"] = 3
        if r.random() < 0.05:
            given = dict(r.sample(list(given.items()), len(given)))
        return given

    def _by_names(self, given: dict[str, Any]) -> None:
        """Now and then the arrays of a sparse argument in its place."""
        for name, arrays in self.subject.raw.items():
            if name in given and given[name].kind == "csr_array" and self.random.random() < 0.15:
                item = given.pop(name)
                given |= {n: self._pooled(n, Item("numpy", (a,))) for n, a in zip(arrays, item.arrays, strict=True)}

    def _numbers(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Sizes, right or wrong."""
        r = self.random
        if "twice" in self.subject.sizes:
            return {"twice": r.choice([1, 2, np.int32(3)] if r.random() < 0.95 else [1.5, True, 2**40])}
        name = r.choice(self.subject.sizes)
        return {name: r.choice([sizes[name]] * 4 + [5, -1, True, np.int64(4), 2**40])} if r.random() < 0.1 else {}

    def _item(self, name: str, shape: tuple[int, ...], is_plain: bool) -> Item:
        r, subject = self.random, self.subject
        known = [i for i in self.pool.get(name, []) if i.shape == shape or i.arrays[0].shape == shape]
        if known and r.random() < 0.5:
            return r.choice(known)
        others = [i for items in self.pool.values() for i in items]
        if name in subject.sparse:
            item = sparse(r, shape, subject.dtype, subject.idtype, subject.block, others, plain=is_plain)  # type: ignore[arg-type]
        elif is_plain:
            item = Item("numpy", (numbers(r, shape, subject.dtype),))
        else:
            item = dense(r, shape, subject.dtype, others)
        return self._pooled(name, item)

    def _pooled(self, name: str, item: Item) -> Item:
        self.pool.setdefault(name, []).append(item)
        return item


def _bound(kernel: Any, fixed: dict[str, Any]) -> Any:
    return kernel.bind(**_objects(fixed)) if fixed else kernel


def _roots(item: Item) -> list[np.ndarray]:
    found = []
    for array in item.arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        found.append(array)
    return found


def _twin(value: Any, memo: Memo) -> Any:
    return value.twin(memo) if isinstance(value, Item) else value


def _object(value: Any) -> Any:
    return value.object if isinstance(value, Item) else value


def _objects(values: dict[str, Any]) -> dict[str, Any]:
    return {n: _object(v) for n, v in values.items()}


def _shown(values: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        if not isinstance(value, Item):
            return repr(value)
        arrays = ", ".join(f"{a.dtype}{list(a.shape)}@{id(a) % 9973}" for a in value.arrays)
        return f"{value.kind}({arrays})"

    return ", ".join(f"{n}={one(v)}" for n, v in values.items())


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives: its result, or the class and text of its error."""
    try:
        return "result", call()
    except Exception as error:
        return "error", f"{type(error).__module__}.{type(error).__name__}: {error}"


def _described(outcome: tuple[str, Any], arguments: dict[str, Any]) -> Any:
    return outcome if outcome[0] == "error" else ("result", _value(outcome[1], arguments))


def _value(value: Any, arguments: dict[str, Any]) -> Any:
    """A result in comparable terms; one that is an argument says so."""
    if isinstance(value, tuple):
        return tuple(_value(part, arguments) for part in value)
    own = [n for n, v in arguments.items() if v is value]
    kind = f"{type(value).__name__} {own}"
    if isinstance(value, np.ndarray):
        return kind, str(value.dtype), value.shape, np.asarray(value).tolist()
    if sp.issparse(value):
        parts = [vars(value)[n] for n in ("indptr", "indices", "coords", "offsets", "data") if n in vars(value)]
        return kind, value.shape, *(np.asarray(p).tolist() for p in parts), str(value.dtype)
    if hasattr(value, "layout") and str(value.layout).startswith("torch.sparse"):
        dense_one = value.to_dense()
        return kind, str(value.layout), str(value.dtype), dense_one.tolist()
    if hasattr(value, "coords"):
        return kind, np.asarray(value.coords).tolist(), value.values.tolist(), value.shape
    return kind, np.asarray(value.detach() if hasattr(value, "detach") else value).tolist()


def _whole(item: Item) -> np.ndarray:
    """An argument as a dense array, by the arrays that it is made of."""
    if len(item.arrays) == 1:
        return np.asarray(item.arrays[0], np.float64)
    data, indptr, indices = item.arrays
    fibers = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr.astype(np.int64)))
    count = len(fibers)
    where = (
        (indices[:count].astype(np.int64), fibers)
        if item.kind == "csc_array"
        else (fibers, indices[:count].astype(np.int64))
    )
    whole = np.zeros(item.shape)
    np.add.at(whole, where, data[:count].astype(np.float64))
    return whole


def _dense(result: Any) -> np.ndarray:
    """A result as a dense array."""
    if sp.issparse(result) and result.format in ("csr", "csc"):
        count, is_rows = np.diff(result.indptr.astype(np.int64)), result.format == "csr"
        major, minor = np.repeat(np.arange(len(count)), count), result.indices[: int(count.sum())]
        where = (major, minor) if is_rows else (minor, major)
        return _added(result.data[: len(major)], where, result.shape)
    if sp.issparse(result):  # halves, which scipy does not make dense, are exact in 32 bits
        return (result.astype(np.float32) if is_half(result) else result).toarray()
    if hasattr(result, "coords"):
        return _added(result.values, tuple(np.asarray(result.coords)), result.shape)
    if hasattr(result, "layout") and str(result.layout).startswith("torch.sparse"):
        return result.to_dense().numpy()
    return np.asarray(result.detach() if hasattr(result, "detach") else result)


def _added(values: np.ndarray, where: Any, shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape, values.dtype)
    np.add.at(whole, tuple(c.astype(np.int64) for c in where), values)
    return whole


def run(name: str, seed: int, calls: int, counts: Counter[str]) -> int:
    """One history of so many steps; raises `Difference`."""
    history = History(name, Random(f"{name} {seed}"))
    compared = 0
    for _ in range(calls):
        found = history.step()
        counts[found.partition(":")[0]] += 1
        if found.startswith("foreign"):
            counts[found[:160]] += 1
        compared += found not in ("nothing", "changed", "spoiled", "bound")
    return compared


__all__ = ["ADD", "MAKERS", "Difference", "History", "run"]
