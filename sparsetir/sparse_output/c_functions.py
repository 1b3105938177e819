# SPDX-License-Identifier: Apache-2.0
"""C interface of an exported kernel that computes patterns: it allocates its results, and the caller frees them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import numpy as np
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.codegen.export import TYPES, Exportable, Interface, declare_machine_code, identifier, plain
from sparsetir.sparse_output.accumulators import AccumulatorOptions
from sparsetir.sparse_output.program import AssembledProgram, SparseResult
from sparsetir.sparse_output.selection import ordered
from sparsetir.utils.caches import cached_property

RUNTIME = Path(__file__).with_name("assemble_runtime.c")


SELECTED = (
    "Of each row the top entries with the largest values are kept, of equal ones those in the first columns, if their",
    "values are at least least; NaN is not. A top of 0 keeps all such.",
)


class AssembledInterface(Interface):
    """C source text around a kernel whose results have computed patterns.

    Parameters
    ----------
    kernel : AssembledKernel
        What is exported.
    assembly : AssembledProgram
        Its program.
    options : AccumulatorOptions
        What its functions do besides.

    Raises
    ------
    LoweringError
        A parameter that has no plain C type.

    Notes
    -----
    A kernel that selects has two parameters more, ``top`` and ``least``.
    """

    least_rank = 2

    def __init__(self, kernel: Exportable, assembly: AssembledProgram, options: AccumulatorOptions) -> None:
        self.assembly, self.is_table, self.selects = assembly, options.accumulators.is_table, options.select
        self.is_stamped = options.stamps(has_mask=assembly.mask is not None)
        params = [p for p in assembly.func.params if not tirx.is_buffer_var(p) or assembly.result_of(p) is None]
        super().__init__(kernel, self.ownership, [*params, *self.chosen_by])
        chain = "_".join(a.name for a in assembly.axes)
        self.indptr, self.indices = (identifier(f"{chain}_{array}", self.taken) for array in ("indptr", "indices"))
        self.values = [identifier(r.storage, self.taken) for r in assembly.results]

    @property
    def computed(self) -> set[str]:
        """Names of the results whose elements are counted while they are computed."""
        return {str(result.name) for result in self.assembly.results}

    @property
    def chosen_by(self) -> list[Var]:
        """The additional parameters of a kernel that selects entries."""
        if not self.selects:
            return []
        least = ordered(self.assembly.results[0].dtype)
        return [Var("top", ir.PrimType("int64")), Var("least", ir.PrimType(least))]

    @property
    def passed(self) -> str:
        count = len(self.given) - len(self.chosen_by)
        return ", ".join(self._passed(at, p, self.places) for at, p in enumerate(self.given[:count])) or "{0}"

    @property
    def ownership(self) -> list[str]:
        """The header's lines about memory ownership."""
        return [
            "The function allocates its results, and sets them to NULL if it fails. Free each with",
            f"{identifier(self.assembly.name, set())}_free, also where it has no entries.",
            "The row pointers count the entries: the last one is their number. The entries of a row are sorted.",
            *(SELECTED if self.selects else ()),
        ]

    @cached_property
    def allocated(self) -> list[tuple[str, str, str]]:
        """The results: C type, name, and description in the header."""
        axes, results = self.assembly.axes, self.assembly.results
        key = " and ".join(a.name for a in axes)
        below = f"coordinates of {key}" + (", as one number in row-major order" if len(axes) > 1 else "")
        rows = 1 if self.rows is None else self.rows
        entries = [
            (TYPES["int64"][0], self.indptr, f"int64[{rows} + 1], where the entries of each row begin"),
            (TYPES[self.assembly.key_dtype][0], self.indices, f"{self.assembly.key_dtype}[nnz], {below}"),
        ]
        for result, name in zip(results, self.values, strict=True):
            dtype = plain(name, result.dtype)
            shape = ", ".join(["nnz", *map(str, result.inner)])
            entries.append((TYPES[dtype][0], name, f"{dtype}[{shape}], values of {result.name}"))
        return entries

    @property
    def outputs(self) -> list[tuple[str, str]]:
        return [(f"{kind} **", name) for kind, name, _ in self.allocated]

    @property
    def described(self) -> list[str]:
        return [*super().described, *(f"{name}: {said}, allocated" for _, name, said in self.allocated)]

    @property
    def prototypes(self) -> dict[str, tuple[str, str]]:
        free = f"{self.name}_free"
        return {
            **super().prototypes,
            free: ("Frees an array that the function allocated.", f"void {free}(void *array);"),
        }

    def definitions(self) -> str:
        symbols = {f"code_{name}": f"{self.assembly.name}_{name}" for name in self.functions}
        declared = "".join(declare_machine_code(*pair) for pair in symbols.items())
        free = f"void {self.name}_free(void *array) {{ free(array); }}\n"
        return f"{RUNTIME.read_text(encoding='utf-8')}\n{declared}\n{free}"

    @property
    def functions(self) -> list[str]:
        """The names of the compiled functions that the C function calls."""
        if self.assembly.merge is not None:
            return ["numeric"]
        return ["bound", "numeric"] if self.is_stamped or self.selects else ["bound", "symbolic", "numeric"]

    @property
    def rows(self) -> ir.Expr | None:
        """The number of rows; None stands for one."""
        return self.assembly.rows[-1].count if self.assembly.rows else None

    def block(self, result: SparseResult) -> str:
        """Return C text: whether a coordinate has a block of elements, and the number of those."""
        if not result.inner:
            return "0, 1"
        return f"1, {reduce(lambda a, b: f'rt_times({a}, {b})', map(self.size_of, result.inner))}"

    @property
    def selection(self) -> list[str]:
        """The C fields that describe the selection."""
        if not self.selects:
            return []
        top, least = len(self.given) - 2, len(self.given) - 1
        value = self._passed(least, self.given[least], self.places)
        return [f".selects = 1, .top = p{top}, .least = {value}, .ordered = {_dtype(self.given[least].dtype)}"]

    def called(self) -> list[str]:
        merge, filters = self.assembly.merge, self.assembly.filters
        offsets = [] if merge is None else [str(a.indptr.name) for a in merge.members if a.indptr is not None]
        members = [f"&arrays[{self.places[name]}]" for name in offsets]
        axes = [a.length for a in self.assembly.axes]
        lengths = [self.size_of(n) for n in (*axes, *(n for r in self.assembly.results for n in r.inner))]
        fields = [
            ", ".join(f".{name} = code_{name}" for name in self.functions),
            f".common = common, .common_count = {len(self.given) - len(self.chosen_by)}",
            f".is_stamped = {int(self.is_stamped)}, .is_table = {int(self.is_table)}",
            f".rows = {'1' if self.rows is None else self.size_of(self.rows)}",
            f".lengths = lengths, .axis_count = {len(axes)}, .length_count = {len(lengths)}",
            f".key = {_dtype(self.assembly.key_dtype)}",
            f".results = results, .result_count = {len(self.values)}, .filter_count = {len(filters)}",
            f".members = members, .member_count = {len(members)}",
            f".is_union = {int(merge is not None and merge.how == 'union')}",
            ".indptr = r0, .keys = (void **)r1",
            *self.selection,
        ]
        results = (
            f"{{{_dtype(r.dtype)}, {_dtype(r.held_dtype)}, UINT64_C({_bits(r)}), (void **)r{at}, {self.block(r)}}}"
            for at, r in enumerate(self.assembly.results, 2)
        )
        return [
            f"const TVMFFIAny common[] = {{{self.passed}}};",
            f"const struct array *const members[] = {{{', '.join(members) or 'NULL'}}};",
            f"const struct result results[] = {{{', '.join(results)}}};",
            f"const int64_t lengths[] = {{{', '.join(lengths)}}};",
            "struct assembly assembly = {",
            *(f"  {field}," for field in fields),
            "};",
            "return rt_assemble(&assembly);",
        ]


def _dtype(name: str) -> str:
    """Return the DLPack form of a dtype as C text."""
    _, kind, bits = TYPES[name]
    return f"{{{kind}, {bits}, 1}}"


def _bits(result: SparseResult) -> int:
    """Return the bits of an accumulator's initial element."""
    value = getattr(result.initial, "value", result.initial)
    element = np.array(value, "uint8" if result.held_dtype == "bool" else result.held_dtype)
    return int.from_bytes(element.tobytes(), "little")


__all__ = ["AssembledInterface"]
