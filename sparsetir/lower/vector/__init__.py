# SPDX-License-Identifier: Apache-2.0
"""Loop passes: vectors, remainders, registers, prefetch."""
