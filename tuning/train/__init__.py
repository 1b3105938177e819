# SPDX-License-Identifier: Apache-2.0
"""Training of the cost model: data sets, evaluation, plots. Nothing here is imported by a search."""
