# SPDX-License-Identifier: Apache-2.0
"""Lowering from stage I to stage II: sparse iterations become nested blocks over positions."""
