# SPDX-License-Identifier: Apache-2.0
"""Tables as text."""

from __future__ import annotations


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    first, *rest = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]).rstrip() for row in rows]


def markdown(cells: list[list[str]]) -> str:
    """Cells as a Markdown table, numbers to the right."""
    heading, *rest = cells
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, rule, *rest])


__all__ = ["aligned", "markdown"]
