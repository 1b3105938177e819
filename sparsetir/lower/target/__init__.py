# SPDX-License-Identifier: Apache-2.0
"""CPU lowering that TVM lacks: scratch buffers, coordinate searches, 16-bit floats, nested guards."""
