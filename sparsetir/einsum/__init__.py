# SPDX-License-Identifier: Apache-2.0
"""Index notation (einsum): compile a one-line expression to stage-I programs.

`subscripts` parses the text and defines the arithmetic, `operands` describes the storage of operands, `planning`
decides that of the result, `order` the contraction order, and `emit` the loops of a contraction and their program.
"""

from __future__ import annotations

from sparsetir.einsum.expression import BoundExpression, Expression, einsum, einsum_expression

__all__ = ["BoundExpression", "Expression", "einsum", "einsum_expression"]
