# SPDX-License-Identifier: Apache-2.0
"""Sparse operators for Relax, and compilation of whole models with the kernels of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetir.relax import gradients, legalize, operators
from sparsetir.relax.calls import (
    attention,
    gather_matmul_scatter,
    gather_outer,
    linear,
    sddmm,
    segment_expand,
    segment_reduce,
    softmax,
    spmm,
    spmv,
    transpose,
)
from sparsetir.relax.legalize import LowerSparse
from sparsetir.relax.model import CompiledModel, build, compile_model, load, tasks
from sparsetir.relax.operators import csr_constants
from sparsetir.relax.sparsify import Layer, SparsifyWeights
from sparsetir.utils.packages import load_at_first_use

if TYPE_CHECKING:
    from sparsetir.relax import nn
    from sparsetir.relax.onnx_import import from_onnx
    from sparsetir.relax.torch_import.models import from_torch
    from sparsetir.relax.torch_import.operators import register_torch_ops
    from sparsetir.relax.training.trainer import TrainStep, train_step


operators.register()
legalize.register()
gradients.register()
gradients.register_dense()

# Names of front ends and of training -> the modules that define them, which are imported at the first use of a name.
__getattr__ = load_at_first_use(
    __name__,
    {
        "TrainStep": "sparsetir.relax.training.trainer",
        "from_onnx": "sparsetir.relax.onnx_import",
        "from_torch": "sparsetir.relax.torch_import.models",
        "nn": "sparsetir.relax.nn",
        "register_torch_ops": "sparsetir.relax.torch_import.operators",
        "train_step": "sparsetir.relax.training.trainer",
    },
)


__all__ = [
    "CompiledModel",
    "Layer",
    "LowerSparse",
    "SparsifyWeights",
    "TrainStep",
    "attention",
    "build",
    "compile_model",
    "csr_constants",
    "from_onnx",
    "from_torch",
    "gather_matmul_scatter",
    "gather_outer",
    "linear",
    "load",
    "nn",
    "register_torch_ops",
    "sddmm",
    "segment_expand",
    "segment_reduce",
    "softmax",
    "spmm",
    "spmv",
    "tasks",
    "train_step",
    "transpose",
]
