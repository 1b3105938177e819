# SPDX-License-Identifier: Apache-2.0
"""Generated matrices and tensors, one function for each family, and programs drawn at random.

The same seed gives the same input. Matrices cover what decides the speed of a sparse kernel: regular and skewed row
lengths, local and scattered columns, blocks, and the limits (one row that holds half of the entries, no entries at
all). They do not stand in for real data.

A drawn program multiplies, subtracts or compares the matrix's values with rows, columns and numbers of dense operands,
and sums the terms, or takes the largest, into dense rows, a vector, or the entries of the pattern. A cost model learns
from them besides the ready ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir.errors import ArgumentError
from sparsetir.interop import CooTensor
from sparsetir.script.printer import parse
from sparsetir.script.writer import ProgramWriter
from sparsetir.utils.arguments import shown
from sparsetir.utils.buffers import aligned

# Entries aimed at; a family rounds to whole grids, blocks or powers of two.
SIZES = {"small": 20_000, "medium": 1_000_000, "large": 10_000_000}
DEGREE = 16
HALF_BAND = 8
NODE_VALUES = 3
BLOCK, WINDOW, GLOBAL, RANDOM = 16, 3, 1, 3
RATINGS, USERS_PER_ITEM = 20, 8
SPARSITIES = (0.5, 0.8, 0.9, 0.95)
QUADRANTS = (0.57, 0.19, 0.19, 0.05)
SKEW = 3.0
COMMUNITY, OUTSIDE = 256, 0.1  # vertices, and the share of the edges that lead elsewhere
LINKS, COPIES, CHANGED = 40, 16, 0.03  # of a row, the rows of a pattern, and the share of their entries that differ

Maker = Callable[[np.random.Generator, int], Any]


# ---------------------------------------------------------------------------------------------------- assembling


def distinct(keys: np.ndarray) -> np.ndarray:
    """Return the different keys in order; several times faster than ``numpy.unique`` on a million of them."""
    ordered = np.sort(keys)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: ordered.size]]


def assemble(rng: np.random.Generator, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> sp.csr_array:
    """CSR with an entry at each pair of coordinates that is named, and normally distributed values."""
    keys = distinct(rows.astype(np.int64) * shape[1] + columns)
    counts = np.bincount(keys // shape[1], minlength=shape[0])
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    values = rng.standard_normal(keys.size, np.float32)
    return sp.csr_array((values, (keys % shape[1]).astype(np.int32), indptr), shape=shape)


def valued(rng: np.random.Generator, pattern: Any) -> sp.csr_array:
    """Return a pattern as CSR with normally distributed values."""
    csr = sorted_csr(pattern)
    csr.data = rng.standard_normal(csr.nnz, np.float32)
    return csr


def sorted_csr(matrix: Any) -> sp.csr_array:
    """float32 CSR with int32 indices, rows sorted."""
    csr = sp.csr_array(matrix, dtype=np.float32)
    csr.sum_duplicates()
    csr.indptr, csr.indices = csr.indptr.astype(np.int32, copy=False), csr.indices.astype(np.int32, copy=False)
    return csr


def skewed(rng: np.random.Generator, extent: int, count: int) -> np.ndarray:
    """Coordinates of which the first are drawn far more often: the density falls as a power of the coordinate."""
    return (extent * rng.random(count) ** SKEW).astype(np.int64)


# ---------------------------------------------------------------------------------------------------- matrices


def uniform(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a square matrix with entries anywhere, 16 in a row on average."""
    n = nnz // DEGREE
    return assemble(rng, rng.integers(0, n, nnz), rng.integers(0, n, nnz), (n, n))


def rmat(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a recursive-matrix (R-MAT) graph: row and column degrees follow power laws.

    Each edge falls into one quadrant of the matrix, then into one of that quadrant, down to a cell. Model: Chakrabarti,
    Zhan and Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SDM 2004. The probabilities of the quadrants (0.57,
    0.19, 0.19, 0.05) and the 16 edges for each vertex are those of the Graph 500 benchmark's specification; edges drawn
    twice count once.
    """
    scale = max(1, round(np.log2(nnz / DEGREE)))
    edges = DEGREE << scale
    rows, columns = np.zeros(edges, np.int64), np.zeros(edges, np.int64)
    limits = np.cumsum(QUADRANTS)[:3]
    for _ in range(scale):
        quadrant = np.searchsorted(limits, rng.random(edges), side="right")
        rows, columns = 2 * rows + quadrant // 2, 2 * columns + quadrant % 2
    return assemble(rng, rows, columns, (1 << scale, 1 << scale))


def banded(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a full band of eight diagonals on each side of the main one."""
    offsets = np.arange(-HALF_BAND, HALF_BAND + 1)
    n = nnz // len(offsets)
    values = rng.standard_normal((len(offsets), n), np.float32)
    return sorted_csr(sp.dia_array((values, offsets), shape=(n, n)))


def stencil_2d(_rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return the five-point Laplacian on a square grid."""
    edge = max(2, round((nnz / 5) ** (1 / 2)))
    return sorted_csr(sp.kronsum(laplacian(edge), laplacian(edge)))


def stencil_3d(_rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return the seven-point Laplacian on a cube."""
    edge = max(2, round((nnz / 7) ** (1 / 3)))
    line = laplacian(edge)
    return sorted_csr(sp.kronsum(sp.kronsum(line, line), line))


def laplacian(n: int) -> Any:
    """Return the second difference on a line."""
    return sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n), dtype=np.float32)


def fem_blocks(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Bilinear finite elements on a square with three unknowns at each node: dense blocks of 3 x 3."""
    edge = max(2, round((nnz / (9 * NODE_VALUES**2)) ** (1 / 2)))
    line = abs(laplacian(edge))
    return valued(rng, sp.kron(sp.kron(line, line), np.ones((NODE_VALUES, NODE_VALUES), np.float32)))


def attention_mask(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a block-sparse attention mask: a window, a global block and random blocks, each of 16 x 16.

    The three parts are those of Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020.
    """
    n = max(8, nnz // ((WINDOW + 2 * GLOBAL + RANDOM) * BLOCK**2))
    rows = np.arange(n)
    window = (rows[:, None] + np.arange(WINDOW) - WINDOW // 2).clip(0, n - 1)
    random = rng.integers(0, n, (n, RANDOM))
    columns = np.concatenate([window, random, np.zeros((n, GLOBAL), np.int64)], axis=1)
    at = np.concatenate([np.repeat(rows, columns.shape[1]), np.zeros(n, np.int64)])
    mask = assemble(rng, at, np.concatenate([columns.ravel(), rows]), (n, n))
    return valued(rng, sp.kron(mask, np.ones((BLOCK, BLOCK), np.float32)))


def pruned(rng: np.random.Generator, nnz: int, *, sparsity: float) -> sp.csr_array:
    """Return a layer's weights, four times as wide as high, of which only the largest in magnitude are kept."""
    m = max(8, round((nnz / (4 * (1 - sparsity))) ** (1 / 2)))
    weights = rng.standard_normal((m, 4 * m), np.float32)
    dropped = round(sparsity * weights.size)
    smallest = np.partition(np.abs(weights), dropped, axis=None)[dropped]
    return sorted_csr(np.where(np.abs(weights) >= smallest, weights, np.float32(0)))


def bipartite(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Users by items, eight times as high as wide; few items are in most rows."""
    m = nnz // RATINGS
    n = max(1, m // USERS_PER_ITEM)
    return assemble(rng, rng.integers(0, m, nnz), skewed(rng, n, nnz), (m, n))


def communities(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a graph whose vertices mostly know those of their community; numbers do not show who belongs together."""
    n = nnz // DEGREE
    of = rng.permutation(n)  # vertices by community, and those of one are neighbours here
    rows = rng.integers(0, n, nnz)
    near = rows // COMMUNITY * COMMUNITY + rng.integers(0, COMMUNITY, nnz)
    columns = np.where(rng.random(nnz) < OUTSIDE, rng.integers(0, n, nnz), np.minimum(near, n - 1))
    return assemble(rng, of[rows], of[columns], (n, n))


def copied_rows(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Rows that copy one of some patterns with changes, in any order, as pages of one kind link to the same places."""
    n = max(1, nnz // LINKS)
    patterns = skewed(rng, n, -(-n // COPIES) * LINKS).reshape(-1, LINKS)
    columns = patterns[rng.integers(0, len(patterns), n)]
    columns = np.where(rng.random(columns.shape) < CHANGED, rng.integers(0, n, columns.shape), columns)
    return assemble(rng, np.repeat(np.arange(n), LINKS), columns.reshape(-1), (n, n))


def giant_row(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """One row without a gap; every other row has an entry or two."""
    n = nnz // 2
    rows = np.concatenate([np.arange(n), np.full(n, n // 2)])
    return assemble(rng, rows, np.concatenate([rng.integers(0, n, n), np.arange(n)]), (n, n))


def small_world(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a ring whose vertices know their neighbours, with a tenth of the edges led elsewhere.

    Model: Watts and Strogatz, "Collective dynamics of 'small-world' networks", Nature 1998.
    """
    n = max(2, nnz // DEGREE)
    rows = np.repeat(np.arange(n), DEGREE)
    near = rows + np.tile(np.concatenate([np.arange(-DEGREE // 2, 0), np.arange(1, DEGREE // 2 + 1)]), n)
    columns = np.where(rng.random(rows.size) < OUTSIDE, rng.integers(0, n, rows.size), near % n)
    return assemble(rng, rows, columns, (n, n))


def long_tail(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Rows in any order whose lengths follow Zipf's law, with entries anywhere."""
    n = max(2, nnz // DEGREE)
    share = 1.0 / np.arange(1, n + 1)
    lengths = np.minimum(n, np.ceil(nnz * share / share.sum())).astype(np.int64)
    rows = np.repeat(rng.permutation(n), lengths)
    return assemble(rng, rows, rng.integers(0, n, rows.size), (n, n))


def hypersparse(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Eight times as many rows and columns as entries; most rows are empty."""
    n = 8 * max(1, nnz)
    return assemble(rng, skewed(rng, n, nnz), rng.integers(0, n, nnz), (n, n))


def block_diagonal(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Full blocks of 8 to 64 rows along the diagonal, as of many small systems solved together."""
    edges = rng.integers(8, 65, max(1, nnz // 1700))
    return valued(rng, sp.block_diag([np.ones((edge, edge), np.float32) for edge in edges], format="csr"))


def two_of_four(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a layer's weights of which two in every four neighbours are kept, four times as wide as high."""
    m = max(4, round((nnz / 2) ** (1 / 2)))
    order = rng.random((m, m, 4)).argsort(axis=2) < 2
    return valued(rng, order.reshape(m, 4 * m).astype(np.float32))


def arrow(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return a diagonal and eight full rows and columns, as of constraints on all unknowns."""
    n = max(HALF_BAND, nnz // (2 * HALF_BAND + 1))
    along, full = np.arange(n), np.repeat(np.arange(HALF_BAND), n)
    rows = np.concatenate([along, full, np.tile(along, HALF_BAND)])
    return assemble(rng, rows, np.concatenate([along, np.tile(along, HALF_BAND), full]), (n, n))


def shuffled_mesh(rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """Return the five-point Laplacian on a square grid whose points are numbered in any order."""
    grid = stencil_2d(rng, nnz)
    order = rng.permutation(grid.shape[0])
    return sorted_csr(grid[order][:, order])


def empty(_rng: np.random.Generator, nnz: int) -> sp.csr_array:
    """No entries at all."""
    n = nnz // DEGREE
    return sorted_csr(sp.csr_array((n, n), dtype=np.float32))


# ---------------------------------------------------------------------------------------------------- tensors


def tensor_of(rng: np.random.Generator, coords: list[np.ndarray], shape: tuple[int, int, int]) -> CooTensor:
    """Return a tensor with an entry at each triple of coordinates, sorted, with normally distributed values."""
    keys = distinct(np.ravel_multi_index(tuple(coords), shape))
    coordinates = np.stack(np.unravel_index(keys, shape)).astype(np.int32)
    return CooTensor(coordinates, rng.standard_normal(keys.size, np.float32), shape)


def tensor_shape(nnz: int) -> tuple[int, int, int]:
    """Three different extents, so that fibers of several entries occur."""
    return max(2, nnz // 50), max(2, nnz // 200), 64


def tensor_uniform(rng: np.random.Generator, nnz: int) -> CooTensor:
    """Return a tensor with entries anywhere."""
    shape = tensor_shape(nnz)
    return tensor_of(rng, [rng.integers(0, n, nnz) for n in shape], shape)


def tensor_skewed(rng: np.random.Generator, nnz: int) -> CooTensor:
    """Return a tensor in which a few coordinates of each dimension have most of the entries."""
    shape = tensor_shape(nnz)
    return tensor_of(rng, [skewed(rng, n, nnz) for n in shape], shape)


# ---------------------------------------------------------------------------------------------------- tables


MATRICES: dict[str, Maker] = {
    "uniform": uniform,
    "rmat": rmat,
    "banded": banded,
    "stencil_2d": stencil_2d,
    "stencil_3d": stencil_3d,
    "fem_blocks": fem_blocks,
    "attention_mask": attention_mask,
    **{f"pruned_{round(100 * s)}": partial(pruned, sparsity=s) for s in SPARSITIES},
    "bipartite": bipartite,
    "communities": communities,
    "copied_rows": copied_rows,
    "giant_row": giant_row,
    "small_world": small_world,
    "long_tail": long_tail,
    "hypersparse": hypersparse,
    "block_diagonal": block_diagonal,
    "two_of_four": two_of_four,
    "arrow": arrow,
    "shuffled_mesh": shuffled_mesh,
    "empty": empty,
}
TENSORS: dict[str, Maker] = {"tensor_uniform": tensor_uniform, "tensor_skewed": tensor_skewed}


def generate(name: str, size: str | int = "small", *, seed: int = 0) -> Any:
    """Return a member of a family with about `size` entries; see `families` and `tensors`."""
    if isinstance(size, str) and size not in SIZES:
        raise ArgumentError(f"expected one of the sizes {', '.join(SIZES)}, got {shown(size)}")
    if seed < 0:
        raise ArgumentError(f"seed: expected a non-negative integer, got {seed}")
    # The name is part of the seed: families drawn alike must not share their random numbers.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (MATRICES | TENSORS)[name](rng, SIZES[size] if isinstance(size, str) else size)


def families() -> dict[str, Callable[..., sp.csr_array]]:
    """Return the families of matrices.

    Returns
    -------
    dict of str to callable
        ``family(size="small", *, seed=0)`` generates a float32 CSR array with int32 indices, its rows sorted, with
        about 20,000 (small), 1,000,000 (medium) or 10,000,000 (large) entries.

    Examples
    --------
    >>> grid = families()["stencil_2d"]("small")
    >>> grid.shape, grid.nnz, grid.max()
    ((3969, 3969), 19593, np.float32(4.0))
    """
    return {name: partial(generate, name) for name in MATRICES}


def tensors() -> dict[str, Callable[..., CooTensor]]:
    """Return the families of tensors of three dimensions, called as those of `families`; each gives a CooTensor."""
    return {name: partial(generate, name) for name in TENSORS}


# The dense operands that a program may have: their axes and subscripts.
OPERANDS = {
    "B": (("J_dense", "K"), "j, k"),
    "D": (("I", "K"), "i, k"),
    "x": (("J_dense",), "j"),
    "z": (("I",), "i"),
    "w": (("K",), "k"),
}
LENGTHS = {"I": 0, "J_dense": 1}  # dimension of the matrix
# Results: the axes, the kinds of the loops over I, J and K, and the operands of which one is always there.
RESULTS = {
    "rows": (("I", "K"), "SRS", ("B",)),
    "sums": (("I",), "SR", ("x",)),
    "entries": (("I", "J"), "SS", ("x", "z")),
    "dots": (("I", "J"), "SSR", ("B",)),
}
MOST_OPERANDS = 3
DIFFERENCES, LARGEST = 0.25, 0.2  # shares of differences among products, and of programs that take the largest term


@dataclass(frozen=True)
class Drawn:
    """A program with the names of its operands.

    Parameters
    ----------
    text : str
        As a script.
    operands : tuple of str
        The dense ones that it reads.
    has_feat : bool
        Whether there is an axis of features.
    """

    text: str
    operands: tuple[str, ...]
    has_feat: bool

    @property
    def program(self) -> tirx.PrimFunc:
        """The program at stage I."""
        func: tirx.PrimFunc = parse(self.text)
        return func

    def inputs(self, matrix: Any, feat: int, dtype: str, *, seed: int = 0) -> dict[str, Any]:
        """Random dense operands for a matrix, in one dtype, and the matrix itself."""
        rng, shapes = np.random.default_rng(seed), {**dict(zip(LENGTHS, matrix.shape, strict=True)), "K": feat}
        dense = {
            name: aligned(rng.standard_normal([shapes[a] for a in OPERANDS[name][0]], np.float32).astype(dtype))
            for name in self.operands
        }
        return {"A": matrix, **dense}


def draw_program(seed: int, dtype: str = "float32") -> Drawn:
    """Return a program, the same for the same seed.

    Parameters
    ----------
    seed : int
    dtype : str
        Of all values.

    Raises
    ------
    ArgumentError
        The seed is negative.

    Examples
    --------
    >>> draw_program(0).text.splitlines()[1].partition("(")[0]
    'def drawn_0'
    """
    if seed < 0:
        raise ArgumentError(f"seed: expected a non-negative integer, got {seed}")
    rng = np.random.default_rng(seed)
    kind = list(RESULTS)[int(rng.integers(len(RESULTS)))]
    result_axes, kinds, needed = RESULTS[kind]
    has_feat = len(kinds) == 3
    possible = [name for name, (axes, _) in OPERANDS.items() if has_feat or "K" not in axes]
    first = needed[int(rng.integers(len(needed)))]
    others = [name for name in possible if name != first]
    count = int(rng.integers(0, min(MOST_OPERANDS, len(others)) + 1)) if others else 0
    chosen = [first, *(others[n] for n in sorted(rng.permutation(len(others))[:count]))]
    term = _term(rng, chosen)
    return Drawn(_text(f"drawn_{seed}", dtype, result_axes, kinds, chosen, term, rng), tuple(chosen), has_feat)


def _term(rng: np.random.Generator, operands: list[str]) -> str:
    """Return the term of an entry: the matrix's value and the operands, in some order."""
    parts = ["A[i, j]", *(f"{name}[{OPERANDS[name][1]}]" for name in operands)]
    parts = [parts[n] for n in rng.permutation(len(parts))]
    while len(parts) > 1:
        left, right = parts.pop(), parts.pop()
        parts.append(f"({left} - {right})" if rng.random() < DIFFERENCES else f"{left} * {right}")
    return parts[0]


def _text(
    name: str, dtype: str, result: tuple[str, ...], kinds: str, operands: list[str], term: str, rng: np.random.Generator
) -> str:
    buffers = {"A": ("I", "J"), **{name: OPERANDS[name][0] for name in operands}, "C": result}
    axes = "IJK"[: len(kinds)]
    writer = ProgramWriter(name, [*(f"{b.lower()}_" for b in buffers), "indptr", "indices"])
    writer.scalars("int32", "m", "n", "nnz", *["feat"] * ("K" in axes))
    writer.dense("I", "m")
    writer.compressed("J", "I", ("n", "nnz"), ("indptr", "indices"), "int32")
    writer.dense("J_dense", "n")
    if "K" in axes:
        writer.dense("K", "feat")
    for buffer, buffer_axes in buffers.items():
        writer.match(buffer, f"{buffer.lower()}_", buffer_axes, dtype)
    stored = f"C[{', '.join(axis[0].lower() for axis in result)}]"
    if "R" not in kinds:
        writer.iterate(axes, kinds, name, [f"{stored} = {term}"])
        return writer.text()
    is_largest = rng.random() < LARGEST
    start = f'T.min_value("{dtype}")' if is_largest else "0"
    update = f"T.max({stored}, {term})" if is_largest else f"{stored} + {term}"
    writer.iterate(axes, kinds, name, [f"{stored} = {update}"], init=f"{stored} = {start}")
    return writer.text()


__all__ = ["SIZES", "Drawn", "draw_program", "families", "tensors"]
