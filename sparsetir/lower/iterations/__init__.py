# SPDX-License-Identifier: Apache-2.0
"""Stage I to II: iterations to nested blocks over positions."""
