# SPDX-License-Identifier: Apache-2.0
"""Changes of a stage-I program: schedule primitives and format decomposition."""

from __future__ import annotations

from sparsetir.formats.base import FormatRewriteRule
from sparsetir.transform.schedule import Schedule, Step, Trace

__all__ = ["FormatRewriteRule", "Schedule", "Step", "Trace"]
