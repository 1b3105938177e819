# SPDX-License-Identifier: Apache-2.0
"""Calling kernels: arguments and signatures, plans for repeated calls, bound and composed kernels, saving."""
