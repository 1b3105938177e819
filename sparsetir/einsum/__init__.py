# SPDX-License-Identifier: Apache-2.0
"""Index notation: an expression in one line becomes stage-I programs.

`subscripts` reads the text, `operands` and `semiring` say what it is about, `planning` decides what the result is
stored as, `orders` what is contracted first, `nest` which loops a contraction has, and `emit` writes its program.
"""

from __future__ import annotations

from sparsetir.einsum.expression import BoundExpression, Expression, einsum, einsum_expression
from sparsetir.einsum.linear_operators import linear_operator

__all__ = ["BoundExpression", "Expression", "einsum", "einsum_expression", "linear_operator"]
