# SPDX-License-Identifier: Apache-2.0
"""Models from torch as Relax modules."""
