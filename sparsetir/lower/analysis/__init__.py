# SPDX-License-Identifier: Apache-2.0
"""Loop analyses: buffer accesses, dependence, independence of steps."""
