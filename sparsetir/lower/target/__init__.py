# SPDX-License-Identifier: Apache-2.0
"""What TVM lacks on a CPU: scratch, searches, halves, conditions in order."""
