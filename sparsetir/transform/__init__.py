# SPDX-License-Identifier: Apache-2.0
"""Changes of a stage-I program: schedule primitives and format decomposition."""

from __future__ import annotations

from sparsetir.transform.rule import FormatRewriteRule

__all__ = ["FormatRewriteRule"]
