# SPDX-License-Identifier: Apache-2.0
"""Utilities without knowledge of programs: machine, threads, dtypes, buffers, memory."""
