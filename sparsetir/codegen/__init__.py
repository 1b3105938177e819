# SPDX-License-Identifier: Apache-2.0
"""From a program to machine code: lowering under a schedule, the caches, export to C."""
