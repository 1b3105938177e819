# SPDX-License-Identifier: Apache-2.0
"""Index notation (einsum): compile a one-line expression to stage-I programs.

`subscripts` parses the text, `operands` and `semiring` describe operands and arithmetic, `planning` decides the storage
of the result, `orders` the contraction order, `nest` the loops of a contraction, and `emit` writes its program.
"""

from __future__ import annotations

from sparsetir.einsum.expression import BoundExpression, Expression, einsum, einsum_expression
from sparsetir.einsum.linear_operators import linear_operator

__all__ = ["BoundExpression", "Expression", "einsum", "einsum_expression", "linear_operator"]
