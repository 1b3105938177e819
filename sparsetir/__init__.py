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
            `triangles` of a graph; `linear_operator` for scipy's solvers
formats     `formats`, `format` of an encoding as text, `SparseTensor`, `CooTensor`, `decompose_format`, `pattern`
schedules   `Schedule` (stage I), `Choices` and `template` (loops), `Accumulators` (computed patterns)
searching   `tune_sparse`, `autotune`; `tune_many` kernels under one budget
models      `relax`; `import sparsetir.torch` for training with torch
files       `read` of matrices and tensors, `load` of saved kernels
threads     `set_num_threads`, `get_num_threads`; checks of indices are left out under `unchecked`

Each name has a help page with an example. Errors are classes of `errors`, all a `SparseTIRError`.

Everything is imported when first used: TVM loads this module each time it starts.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparsetir import later as _later
from sparsetir._autoload import ensure as _ensure_dialect
from sparsetir.version import __version__ as __version__

if TYPE_CHECKING:
    from sparsetir import errors, formats, ir, ops, relax
    from sparsetir import tvmscript as T
    from sparsetir.alignment import aligned
    from sparsetir.assemble import Accumulators
    from sparsetir.build import build
    from sparsetir.call.arguments import unchecked
    from sparsetir.call.bound import BoundKernel
    from sparsetir.call.kernel import Kernel
    from sparsetir.call.saving import load
    from sparsetir.compile.pipeline import lower
    from sparsetir.counting import triangles
    from sparsetir.errors import SparseTIRError
    from sparsetir.files import read
    from sparsetir.formats.encodings import format
    from sparsetir.formats.pattern import Pattern, pattern
    from sparsetir.formats.tensor import SparseTensor
    from sparsetir.interop import CooTensor
    from sparsetir.interpret import interpret
    from sparsetir.lazy import compute, fused, lazy, relu, softmax
    from sparsetir.notation import einsum, einsum_expression, linear_operator
    from sparsetir.notation.sparsify import sparsify
    from sparsetir.products import add, matmul, matmul_plan, maximum, multiply, rap, subtract
    from sparsetir.schedules import Choices
    from sparsetir.script.printer import parse, script
    from sparsetir.threads import get_num_threads, set_num_threads
    from sparsetir.transform import FormatRewriteRule, Schedule
    from sparsetir.transform.decompose import Decomposition, decompose_format
    from sparsetir.tuning import TuneManyResult, TuneResult, TuneTask, autotune, tune_many, tune_sparse
    from sparsetir.tuning.templates import template
    from sparsetir.verify import verify


# Public name -> where it lives; a module stands for itself.
_PUBLIC = {
    "Accumulators": "sparsetir.assemble",
    "BoundKernel": "sparsetir.call.bound",
    "Choices": "sparsetir.schedules",
    "CooTensor": "sparsetir.interop",
    "Decomposition": "sparsetir.transform.decompose",
    "FormatRewriteRule": "sparsetir.transform",
    "Kernel": "sparsetir.call.kernel",
    "Pattern": "sparsetir.formats.pattern",
    "Schedule": "sparsetir.transform",
    "SparseTIRError": "sparsetir.errors",
    "SparseTensor": "sparsetir.formats.tensor",
    "T": "sparsetir.tvmscript",
    "TuneManyResult": "sparsetir.tuning",
    "TuneResult": "sparsetir.tuning",
    "TuneTask": "sparsetir.tuning",
    "add": "sparsetir.products",
    "aligned": "sparsetir.alignment",
    "autotune": "sparsetir.tuning",
    "build": "sparsetir.build",
    "compute": "sparsetir.lazy",
    "decompose_format": "sparsetir.transform.decompose",
    "einsum": "sparsetir.notation",
    "einsum_expression": "sparsetir.notation",
    "errors": "sparsetir.errors",
    "format": "sparsetir.formats.encodings",
    "formats": "sparsetir.formats",
    "fused": "sparsetir.lazy",
    "get_num_threads": "sparsetir.threads",
    "interpret": "sparsetir.interpret",
    "ir": "sparsetir.ir",
    "lazy": "sparsetir.lazy",
    "linear_operator": "sparsetir.notation",
    "load": "sparsetir.call.saving",
    "lower": "sparsetir.compile.pipeline",
    "matmul": "sparsetir.products",
    "matmul_plan": "sparsetir.products",
    "maximum": "sparsetir.products",
    "multiply": "sparsetir.products",
    "ops": "sparsetir.ops",
    "parse": "sparsetir.script.printer",
    "pattern": "sparsetir.formats.pattern",
    "rap": "sparsetir.products",
    "read": "sparsetir.files",
    "relax": "sparsetir.relax",
    "relu": "sparsetir.lazy",
    "script": "sparsetir.script.printer",
    "set_num_threads": "sparsetir.threads",
    "softmax": "sparsetir.lazy",
    "sparsify": "sparsetir.notation.sparsify",
    "subtract": "sparsetir.products",
    "template": "sparsetir.tuning.templates",
    "triangles": "sparsetir.counting",
    "tune_many": "sparsetir.tuning",
    "tune_sparse": "sparsetir.tuning",
    "unchecked": "sparsetir.call.arguments",
    "verify": "sparsetir.verify",
}
_MODULES = ("T", "errors", "formats", "ir", "ops", "relax")
__all__ = [
    "Accumulators",
    "BoundKernel",
    "Choices",
    "CooTensor",
    "Decomposition",
    "FormatRewriteRule",
    "Kernel",
    "Pattern",
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
    "interpret",
    "ir",
    "lazy",
    "linear_operator",
    "load",
    "lower",
    "matmul",
    "matmul_plan",
    "maximum",
    "multiply",
    "ops",
    "parse",
    "pattern",
    "rap",
    "read",
    "relax",
    "relu",
    "script",
    "set_num_threads",
    "softmax",
    "sparsify",
    "subtract",
    "template",
    "triangles",
    "tune_many",
    "tune_sparse",
    "unchecked",
    "verify",
]

_ensure_dialect()
_later.provide("operators", "sparsetir.notation.operators")


class _Face(ModuleType):
    """Importing a submodule (``sparsetir.lower``) must not hide the public function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _PUBLIC and name not in _MODULES:
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = _PUBLIC.get(name)
        if where is None:
            raise AttributeError(f"module 'sparsetir' has no attribute {name!r}")
        module = importlib.import_module(where)
        value = module if name in _MODULES else getattr(module, name)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        own = (name for name in super().__dir__() if name.startswith("__"))
        return sorted({*own, *__all__})


sys.modules[__name__].__class__ = _Face
