# SPDX-License-Identifier: Apache-2.0
"""SparseTIR: a compiler for sparse tensor programs, as a dialect of TVM's TIR.

Write a program in TVMScript (``from tvm.script import sparsetir as T``) or take a ready one, build it, and call the
kernel by name on scipy, torch or numpy data:

>>> import numpy as np, scipy.sparse as sp, sparsetir
>>> kernel = sparsetir.build(sparsetir.ops.spmm())
>>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
>>> kernel(A=A, B=np.ones((2, 1), "float32")).tolist()
[[2.0], [3.0]]

expressions `einsum`, `einsum_expression`: index notation over sparse and dense operands, no program to write;
            `sparsify` of a dense program; `lazy`, `compute` and `fused` chains (`relu`, `softmax`)
programs    `parse`, `script`, `verify`, `interpret`; ready ones in `ops`; their axes and buffers in `ir`
kernels     `build`, `Kernel`, `Kernel.bind`; `lower` for the stages between
products    `matmul`, `matmul_plan`, `add`, `subtract`, `multiply`, `maximum`, `rap` of sparse matrices,
            `tensordot`, `vstack`, `hstack`; `Postings` for retrieval; `grouped_matmul` of ragged groups;
            `triangles` of a graph;
            `linear_operator` for scipy's solvers
formats     `formats`, `format` of an encoding as text, `SparseTensor`, `CooTensor`, `decompose_format`, `pattern`
schedules   `Schedule` (stage I), `Choices` and `template` (loops), `Accumulators` (computed patterns),
            matrix instructions for `sch.tensorize` in `intrin`
searching   `tune_sparse`, `autotune`; `tune_many` kernels under one budget
models      `relax`; `import sparsetir.torch` for training with torch
files       `read` of matrices and tensors, `load` of saved kernels
on disk     `open_blocks` and `save_blocks` of matrices larger than memory; `import sparsetir.dask` for several machines
threads     `set_num_threads`, `get_num_threads`; checks of indices are left out under `unchecked`

Each name has a help page with an example. Errors are classes of `errors`, all a `SparseTIRError`.

Everything is imported when first used: TVM loads this module each time it starts.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparsetir._tvm_plugin import ensure as _ensure_dialect
from sparsetir.utils.packages import __version__ as __version__
from sparsetir.utils.packages import in_one_piece as _in_one_piece
from sparsetir.utils.packages import postpone_torch as _postpone_torch

if TYPE_CHECKING:
    from sparsetir import errors, formats, intrin, ir, ops, relax
    from sparsetir.blocks import open_blocks, save_blocks
    from sparsetir.build import build
    from sparsetir.codegen.pipeline import lower
    from sparsetir.einsum import einsum, einsum_expression
    from sparsetir.einsum.linear_operators import linear_operator
    from sparsetir.einsum.numpy_functions import hstack, tensordot, vstack
    from sparsetir.einsum.products import add, grouped_matmul, matmul, multiply, subtract
    from sparsetir.einsum.sparsify import sparsify
    from sparsetir.errors import SparseTIRError
    from sparsetir.formats.encoding import format
    from sparsetir.formats.pattern import Pattern, pattern
    from sparsetir.formats.tensor import SparseTensor
    from sparsetir.interop import CooTensor
    from sparsetir.io import read
    from sparsetir.ir.interpreter import interpret
    from sparsetir.ir.verifier import verify
    from sparsetir.lazy import compute, fused, lazy, relu, softmax
    from sparsetir.runtime.bound import BoundKernel
    from sparsetir.runtime.kernel import Kernel
    from sparsetir.runtime.serialization import load
    from sparsetir.runtime.signature import unchecked
    from sparsetir.schedules import Choices
    from sparsetir.script import tvmscript as T
    from sparsetir.script.printer import parse, script
    from sparsetir.sparse_output import Accumulators
    from sparsetir.sparse_output.postings import Postings
    from sparsetir.sparse_output.products import matmul_plan, maximum, rap
    from sparsetir.sparse_output.triangles import triangles
    from sparsetir.transform import FormatRewriteRule, Schedule
    from sparsetir.transform.decompose import Decomposition, decompose_format
    from sparsetir.tuning import TuneManyResult, TuneResult, TuneTask, autotune, tune_many, tune_sparse
    from sparsetir.tuning.knobs import template
    from sparsetir.utils.buffers import aligned
    from sparsetir.utils.threads import get_num_threads, set_num_threads


# Public name -> where it lives; a module stands for itself.
_PUBLIC = {
    "Accumulators": "sparsetir.sparse_output",
    "BoundKernel": "sparsetir.runtime.bound",
    "Choices": "sparsetir.schedules",
    "CooTensor": "sparsetir.interop",
    "Decomposition": "sparsetir.transform.decompose",
    "FormatRewriteRule": "sparsetir.transform",
    "Kernel": "sparsetir.runtime.kernel",
    "Pattern": "sparsetir.formats.pattern",
    "Postings": "sparsetir.sparse_output.postings",
    "Schedule": "sparsetir.transform",
    "SparseTIRError": "sparsetir.errors",
    "SparseTensor": "sparsetir.formats.tensor",
    "T": "sparsetir.script.tvmscript",
    "TuneManyResult": "sparsetir.tuning",
    "TuneResult": "sparsetir.tuning",
    "TuneTask": "sparsetir.tuning",
    "add": "sparsetir.einsum.products",
    "aligned": "sparsetir.utils.buffers",
    "autotune": "sparsetir.tuning",
    "build": "sparsetir.build",
    "compute": "sparsetir.lazy",
    "decompose_format": "sparsetir.transform.decompose",
    "einsum": "sparsetir.einsum",
    "einsum_expression": "sparsetir.einsum",
    "errors": "sparsetir.errors",
    "format": "sparsetir.formats.encoding",
    "formats": "sparsetir.formats",
    "fused": "sparsetir.lazy",
    "get_num_threads": "sparsetir.utils.threads",
    "grouped_matmul": "sparsetir.einsum.products",
    "hstack": "sparsetir.einsum.numpy_functions",
    "interpret": "sparsetir.ir.interpreter",
    "intrin": "sparsetir.intrin",
    "ir": "sparsetir.ir",
    "lazy": "sparsetir.lazy",
    "linear_operator": "sparsetir.einsum.linear_operators",
    "load": "sparsetir.runtime.serialization",
    "lower": "sparsetir.codegen.pipeline",
    "matmul": "sparsetir.einsum.products",
    "matmul_plan": "sparsetir.sparse_output.products",
    "maximum": "sparsetir.sparse_output.products",
    "multiply": "sparsetir.einsum.products",
    "open_blocks": "sparsetir.blocks",
    "ops": "sparsetir.ops",
    "parse": "sparsetir.script.printer",
    "pattern": "sparsetir.formats.pattern",
    "rap": "sparsetir.sparse_output.products",
    "read": "sparsetir.io",
    "relax": "sparsetir.relax",
    "relu": "sparsetir.lazy",
    "save_blocks": "sparsetir.blocks",
    "script": "sparsetir.script.printer",
    "set_num_threads": "sparsetir.utils.threads",
    "softmax": "sparsetir.lazy",
    "sparsify": "sparsetir.einsum.sparsify",
    "subtract": "sparsetir.einsum.products",
    "template": "sparsetir.tuning.knobs",
    "tensordot": "sparsetir.einsum.numpy_functions",
    "triangles": "sparsetir.sparse_output.triangles",
    "tune_many": "sparsetir.tuning",
    "tune_sparse": "sparsetir.tuning",
    "unchecked": "sparsetir.runtime.signature",
    "verify": "sparsetir.ir.verifier",
    "vstack": "sparsetir.einsum.numpy_functions",
}
_MODULES = ("T", "errors", "formats", "intrin", "ir", "ops", "relax")
_IMPORTED_BY_NAME = ("bench", "dask", "scipy", "torch", "workloads")


_postpone_torch()  # before anything imports TVM
_ensure_dialect()


class _Face(ModuleType):
    """Importing a submodule (``sparsetir.lower``) must not hide the public function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _PUBLIC and name not in _MODULES:
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = _PUBLIC.get(name)
        if where is None:
            hint = f": import sparsetir.{name}" if name in _IMPORTED_BY_NAME else ""
            raise AttributeError(f"module 'sparsetir' has no attribute {name!r}{hint}")
        module = _in_one_piece(importlib.import_module)(where)
        value = module if name in _MODULES else getattr(module, name)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        own = (name for name in super().__dir__() if name.startswith("__"))
        return sorted({*own, *__all__})


sys.modules[__name__].__class__ = _Face


__all__ = [
    "Accumulators",
    "BoundKernel",
    "Choices",
    "CooTensor",
    "Decomposition",
    "FormatRewriteRule",
    "Kernel",
    "Pattern",
    "Postings",
    "Schedule",
    "SparseTIRError",
    "SparseTensor",
    "T",
    "TuneManyResult",
    "TuneResult",
    "TuneTask",
    "add",
    "aligned",
    "autotune",
    "build",
    "compute",
    "decompose_format",
    "einsum",
    "einsum_expression",
    "errors",
    "format",
    "formats",
    "fused",
    "get_num_threads",
    "grouped_matmul",
    "hstack",
    "interpret",
    "intrin",
    "ir",
    "lazy",
    "linear_operator",
    "load",
    "lower",
    "matmul",
    "matmul_plan",
    "maximum",
    "multiply",
    "open_blocks",
    "ops",
    "parse",
    "pattern",
    "rap",
    "read",
    "relax",
    "relu",
    "save_blocks",
    "script",
    "set_num_threads",
    "softmax",
    "sparsify",
    "subtract",
    "template",
    "tensordot",
    "triangles",
    "tune_many",
    "tune_sparse",
    "unchecked",
    "verify",
    "vstack",
]
