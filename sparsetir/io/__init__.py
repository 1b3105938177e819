# SPDX-License-Identifier: Apache-2.0
"""Matrices and tensors on disk: `files` that are read whole, and `stores` whose rows can be read in ranges."""

from __future__ import annotations

from sparsetir.io.files import READERS, UNPACKERS, read

__all__ = ["READERS", "UNPACKERS", "read"]
