# SPDX-License-Identifier: Apache-2.0
"""Sparse layers for models written with ``tvm.relax.frontend.nn``."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.core import wrap_nested

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.relax import calls


class SparseLinear(nn.Module):
    """A linear layer whose weight is a CSR matrix: ``y[..., o] = sum_i W[o, i] * x[..., i] + bias[o]``.

    The weight is three parameters: ``data`` of nnz values, ``indptr`` of ``out_features + 1`` and ``indices`` of nnz.
    Passed to `sparsetir.relax.build` they become constants, and the format is chosen for them.

    Parameters
    ----------
    in_features, out_features : int
    nnz_or_csr : int, or scipy.sparse array or matrix
        The number of entries of the weight, or the weight itself, of shape (out_features, in_features).
    bias : bool
    dtype : str, optional
        Dtype of the values; by default that of the matrix, or "float32".
    idtype : {"int32", "int64"}
        Dtype of the index arrays.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir.relax
    >>> from tvm.relax.frontend import nn
    >>> from sparsetir.relax.nn import SparseLinear
    >>> layer = SparseLinear.from_scipy(sp.eye_array(3, 4, format="csr", dtype="float32"))
    >>> mod, params = layer.export_tvm({"forward": {"x": nn.spec.Tensor(["n", 4], "float32")}})
    >>> sparsetir.relax.compile_model(mod, params=dict(params))(np.ones((1, 4), "float32"))
    array([[1., 1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        nnz_or_csr: Any,
        bias: bool = True,
        dtype: str | None = None,
        *,
        idtype: str = "int32",
    ) -> None:
        super().__init__()
        matrix = _matrix(nnz_or_csr, (out_features, in_features)) if sp.issparse(nnz_or_csr) else None
        if matrix is None and not isinstance(nnz_or_csr, (int, np.integer)):
            class_name = type(nnz_or_csr).__name__
            raise ArgumentTypeError(f"expected a number of entries or a scipy.sparse matrix, got {class_name}")
        nnz = int(nnz_or_csr) if matrix is None else matrix.nnz
        dtype = dtype or ("float32" if matrix is None else str(matrix.dtype))
        self.in_features, self.out_features, self.nnz = in_features, out_features, nnz
        self.data = nn.Parameter((nnz,), dtype)
        self.indptr = nn.Parameter((out_features + 1,), idtype)
        self.indices = nn.Parameter((nnz,), idtype)
        self.bias = nn.Parameter((out_features,), dtype) if bias else None
        if matrix is not None:
            self.set_weight(matrix)

    @classmethod
    def from_scipy(cls, csr: Any, bias: Any = None, *, idtype: str = "int32") -> SparseLinear:
        """Create a layer with a given weight, of shape (out_features, in_features), and a bias or none."""
        if not sp.issparse(csr):
            raise ArgumentTypeError(f"expected a scipy.sparse matrix, got {type(csr).__name__}")
        layer = cls(csr.shape[1], csr.shape[0], csr, bias is not None, idtype=idtype)
        if layer.bias is not None:
            if np.shape(bias) != (layer.out_features,):
                raise ArgumentError(f"bias has shape {np.shape(bias)}; expected ({layer.out_features},)")
            layer.bias.data = np.asarray(bias, layer.bias.dtype)
        return layer

    def set_weight(self, csr: Any) -> None:
        """Replace the weight by a matrix of the same shape and number of entries."""
        matrix = _matrix(csr, (self.out_features, self.in_features))
        if matrix.nnz != self.nnz:
            raise ArgumentError(f"the layer was made for {self.nnz} entries, got {matrix.nnz}")
        arrays = (matrix.data, matrix.indptr, matrix.indices)
        for parameter, array in zip((self.data, self.indptr, self.indices), arrays, strict=True):
            parameter.data = array.astype(parameter.dtype)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Apply the layer."""
        parts = (self.data._expr, self.indptr._expr, self.indices._expr)
        y = wrap_nested(calls.linear(x._expr, *parts), "sparse_linear")
        return y if self.bias is None else nn.op.add(y, self.bias)


def _matrix(value: Any, shape: tuple[int, int]) -> sp.csr_array:
    """Convert to a sorted CSR matrix, after checking the shape."""
    if tuple(value.shape) != shape:
        raise ArgumentError(f"the weight has shape {tuple(value.shape)}; expected {shape}, outputs by inputs")
    matrix = sp.csr_array(value)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    return matrix


__all__ = ["SparseLinear"]
