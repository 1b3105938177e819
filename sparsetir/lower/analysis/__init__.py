# SPDX-License-Identifier: Apache-2.0
"""Analyses of loops: accesses, dependence, independence."""
