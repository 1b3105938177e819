# SPDX-License-Identifier: Apache-2.0
"""Row loops: partition among threads, fusion, operand packing, register blocking."""
