# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks and the search share: inputs, operands, reference results, timing, other libraries, tables."""
