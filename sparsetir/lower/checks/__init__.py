# SPDX-License-Identifier: Apache-2.0
"""Legality checks of schedules (order of steps, parallel loops, cached copies, structure), and checks in kernels."""
