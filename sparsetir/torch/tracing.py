# SPDX-License-Identifier: Apache-2.0
"""The operators of graphs in programs that torch traces, for `torch.compile` and `torch.export`.

Such a program holds tensors, not graphs. A call of a graph's method is one operator in it, ``along_rows``, whose
structure are the index arrays, or ``along_edges``, whose structure are targets and sources. torch takes these apart as
it traces gradients: below them are the functions of functions.py as they are, and below those, for each kernel,
``edges_kernel``. Arrays lead back to the structures that they belong to, which have kernels and transposes already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.autograd import Function

import torch
from sparsetir.script.parser import literal
from sparsetir.torch import functions
from sparsetir.torch.block_attention import attend
from sparsetir.torch.graph import Graph
from sparsetir.torch.graph_caches import GraphCache
from sparsetir.torch.programs import Sizes
from sparsetir.torch.structure import known
from torch import Tensor

GRAPHS = GraphCache()  # of targets and sources
PLAIN = (Tensor, torch.nn.Parameter)
PLAIN_ATTENTION = ("Q", "KEYS", "V")  # operands without dropout and features of edges
STRUCTURE = "Tensor first, Tensor? second, SymInt rows, SymInt columns"
OPTIONS = 'str reduce="", float? scale=None, float dropout=0.0, str activation="", str precision=""'
CALL = f"str method, Tensor?[] tensors, *, {OPTIONS}) -> Tensor"


# ------------------------------------------------------------------ while torch traces


@dataclass(frozen=True)
class TracedSide:
    """Rows or columns of a graph of which there are only symbolic tensors.

    Parameters
    ----------
    structure : tuple
        `first` and `second`, the numbers of rows and of columns.
    by_edges : bool
        Whether `first` and `second` are targets and sources; index arrays otherwise.
    is_transposed : bool
    """

    blocks = None  # blocks are looked for when the program runs
    structure: tuple[Tensor, Tensor | None, int, int]
    by_edges: bool
    is_transposed: bool = False

    @property
    def transposed(self) -> TracedSide:
        return TracedSide(self.structure, self.by_edges, True)

    def check(self) -> None:
        """Do nothing: changes in place are detected when the program runs."""

    def run(self, name: str, dtype: str, inner: Sizes, *options: Any, **tensors: Tensor | None) -> Any:
        """Add a call of `edges_kernel` to the trace, with the signature of `structure.Compressed.run`."""
        operands = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        sizes = tuple((axis, None if size is None else int(size)) for axis, size in inner)
        program = repr((name, dtype, sizes, options, tuple(operands)))
        where = (*self.structure, self.by_edges, self.is_transposed)
        results = torch.ops.sparsetir.edges_kernel(*where, program, list(operands.values()))
        return results[0] if len(results) == 1 else tuple(results)

    def share(self, dtype: torch.dtype) -> Tensor:
        """Return one over the number of entries of each row, as `structure.Compressed.share` does."""
        return self.run("share", functions.NAMES[dtype], ())


class Ordered(Function):
    """Values of edges, in the order of targets and sources, in the order of rows, or back."""

    @staticmethod
    def forward(ctx: Any, rows: TracedSide, values: Tensor, back: bool) -> Tensor:
        ctx.rows, ctx.back = rows, back
        return rows.run("as_given" if back else "by_rows", functions.NAMES[values.dtype], (), W=values.contiguous())

    @staticmethod
    @functions.once
    def backward(ctx: Any, g: Tensor) -> Any:
        name = "by_rows" if ctx.back else "as_given"
        return None, ctx.rows.run(name, functions.NAMES[g.dtype], (), W=g.contiguous()), None


class TracedGraph(Graph):
    """A graph of symbolic tensors."""

    rows: TracedSide  # type: ignore[assignment]

    def __init__(
        self, *structure: Any, by_edges: bool, there: Tensor | None = None, back: Tensor | None = None
    ) -> None:
        self.rows, self.by_edges, self.shape = TracedSide(structure, by_edges), by_edges, structure[2:]
        self._edges = structure[0] if by_edges else structure[1]
        self.weight, self.there, self.back, self._precise = None, there, back, {}

    @property
    def num_edges(self) -> int:
        return self._edges.shape[0]

    def is_to_trace(self, tensor: Any) -> bool:
        return False

    def by_rows(self, edges: Tensor, name: str = "weight", ranks: tuple[int, int] = (1, 2)) -> Tensor:
        ordered = super().by_rows(edges, name, ranks)
        return Ordered.apply(self.rows, ordered, False) if self.by_edges else ordered

    def as_given(self, edges: Tensor) -> Tensor:
        return Ordered.apply(self.rows, edges, True) if self.by_edges else super().as_given(edges)


# ------------------------------------------------------------------ the operators


def _is_plain(tensors: list[Tensor | None], structure: Tensor) -> bool:
    return all(type(tensor) in PLAIN for tensor in (structure, *tensors) if tensor is not None)


def _called(
    graph: Graph,
    method: str,
    tensors: list[Tensor | None],
    reduce: str = "",
    scale: float | None = None,
    dropout: float = 0.0,
    activation: str = "",
    precision: str = "",
) -> Tensor:
    number = "scale" if method == "attention" else "slope"
    options: dict[str, Any] = {"reduce": reduce} if reduce else {} if scale is None else {number: scale}
    if dropout:
        *tensors, seed = tensors
        options |= {"dropout": dropout, "seed": seed}
    if method in ("attention", "additive_attention") and len(tensors) == 4:
        *tensors, options["edges"] = tensors
    if method == "spmm" and len(tensors) == 3:
        *tensors, options["bias"] = tensors
    if activation:
        options["activation"] = activation
    if precision:
        options["precision"] = precision
    return getattr(graph, method)(*tensors, **options)


def along_rows(
    first: Tensor,
    second: Tensor,
    rows: int,
    columns: int,
    there: Tensor | None,
    back: Tensor | None,
    method: str,
    tensors: list[Tensor | None],
    **options: Any,
) -> Tensor:
    """Call a method of the graph with these index arrays; `there` and `back` lead from and to the given order."""
    if _is_plain(tensors, first):
        graph = Graph.of_rows(known(first, second, columns), there, back)
    else:
        graph = TracedGraph(first, second, rows, columns, by_edges=False, there=there, back=back)
    return _called(graph, method, tensors, **options)


def along_edges(
    first: Tensor,
    second: Tensor | None,
    rows: int,
    columns: int,
    method: str,
    tensors: list[Tensor | None],
    **options: Any,
) -> Tensor:
    """Call a method of the graph with these targets and sources; without sources each edge has a column of its own."""
    if _is_plain(tensors, first):
        graph = GRAPHS.of(first, second, rows, columns)
    else:
        graph = TracedGraph(first, second, rows, columns, by_edges=True)
    return _called(graph, method, tensors, **options)


def along_index(index: Tensor, at: tuple[int, int], rows: int, columns: int, *call: Any, **options: Any) -> Tensor:
    """Call `along_edges` with targets and sources that are rows of one tensor."""
    if not _is_plain(call[1], index):
        return along_edges(index[at[0]], index[at[1]], rows, columns, *call, **options)
    return _called(GRAPHS.of_both(index, at, rows, columns), *call, **options)


_parsed = lru_cache(maxsize=1024)(literal)


def edges_kernel(
    first: Tensor,
    second: Tensor | None,
    rows: int,
    columns: int,
    by_edges: bool,
    is_transposed: bool,
    program: str,
    tensors: list[Tensor],
) -> list[Tensor]:
    """Run a kernel over the rows or columns of a structure.

    Parameters
    ----------
    first, second : Tensor
        Targets and sources, or index arrays; without `second` each edge has a column of its own.
    rows, columns : int
    by_edges, is_transposed : bool
    program : str
        The name, dtype, axes and options of the program, and the names of its operands.
    tensors : list of Tensor
    """
    name, dtype, inner, options, names = _parsed(program)
    graph = GRAPHS.of(first, second, rows, columns) if by_edges else None
    side = known(first, second, columns) if graph is None else graph.rows
    side.check()
    if name == "share":
        return [side.share(getattr(torch, dtype)).clone()]
    if graph is not None and name in ("by_rows", "as_given"):
        order = graph.there if name == "by_rows" else graph.back
        return [tensors[0].clone() if order is None else tensors[0].index_select(0, order)]
    side = side.transposed if is_transposed else side
    if name == "attention" and names == PLAIN_ATTENTION and not options[-1] and side.blocks is not None:
        q, k, v = tensors
        mixed = attend(side.blocks, q, k, v, options[0], keep=False)
        if mixed is not None:
            return [mixed[0]]
    result = side.run(name, dtype, inner, *options, **dict(zip(names, tensors, strict=True)))
    return list(result) if type(result) is tuple else [result]


def _shapes(name: str, rows: Any, edges: Any, options: Any, operands: dict[str, Tensor]) -> list[tuple[Any, ...]]:
    """Return the shapes of the outputs of a kernel, `rows` those of the side that it runs over."""
    shape = {key: tensor.shape for key, tensor in operands.items()}
    if name in ("attention", "dynamic", "additive"):
        out = (rows, *shape["V"][1:])
        return [(edges, *shape["V"][1:-1]), out] if options[-1] else [out]
    if name == "attention_rows":
        return [tuple(shape["p__data"]), (rows, *shape["KEYS"][1:])]
    if name in ("dynamic_rows", "additive_rows"):
        return [tuple(shape["p__data"]), tuple(shape["TARGETS"])]
    if name == "dynamic_columns":
        return [tuple(shape["TARGETS"]), (rows, *shape["G"][1:])]
    if name in ("attention_columns", "additive_columns"):
        return [(rows, *shape["Q" if name == "attention_columns" else "S"][1:]), (rows, *shape["G"][1:])]
    values = shape.get("w_data", shape.get("W", ()))
    shapes_of: dict[str, Any] = {
        "spmm": lambda: (rows, *shape["X"][1:]),
        "linear": lambda: (shape["X"][0], rows),
        "row_sum": lambda: (rows, *values[1:]),
        "sddmm": lambda: (edges, *shape["X"][1:-1]),
        "edge_sum": lambda: (edges, *shape["X"][1:]),
        "ties": lambda: tuple(shape["Y"]),
        "picked": lambda: tuple(shape["X"]),
        "softmax_gradient": lambda: tuple(shape["p__data"]),
        "share": lambda: (rows,),
        "dynamic_edges": lambda: tuple(shape["edges_data"]),
        "attention_edges": lambda: (edges, *shape["Q"][1:]),
    }
    return [shapes_of.get(name, lambda: tuple(values))()]


def _fake(
    first: Tensor,
    second: Tensor | None,
    rows: Any,
    columns: Any,
    by_edges: bool,
    is_transposed: bool,
    program: str,
    tensors: list[Tensor],
) -> list[Tensor]:
    name, dtype, _, options, names = _parsed(program)
    edges = first.shape[0] if by_edges or second is None else second.shape[0]
    shapes = _shapes(name, columns if is_transposed else rows, edges, options, dict(zip(names, tensors, strict=True)))
    if not tensors:
        return [torch.empty(shape, dtype=getattr(torch, dtype), device=first.device) for shape in shapes]
    return [tensors[0].new_empty(shape) for shape in shapes]


LIBRARY = torch.library.Library("sparsetir", "FRAGMENT")
LIBRARY.define(f"along_rows({STRUCTURE}, Tensor? there, Tensor? back, {CALL}")
LIBRARY.define(f"along_edges({STRUCTURE}, {CALL}")
LIBRARY.define(
    f"edges_kernel({STRUCTURE}, bool by_edges, bool is_transposed, str program, Tensor[] tensors) -> Tensor[]"
)
LIBRARY.impl("along_rows", along_rows, "CompositeImplicitAutograd")
LIBRARY.impl("along_edges", along_edges, "CompositeImplicitAutograd")
LIBRARY.impl("edges_kernel", edges_kernel, "CPU")
torch.library.register_fake("sparsetir::edges_kernel", _fake, lib=LIBRARY)


__all__ = ["GRAPHS", "TracedGraph", "along_edges", "along_index", "along_rows", "edges_kernel"]
