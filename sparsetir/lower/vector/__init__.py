# SPDX-License-Identifier: Apache-2.0
"""Loop passes: vectorization, remainder loops, register promotion, prefetch."""
