# SPDX-License-Identifier: Apache-2.0
"""Directive for names of the dialect: signatures and docstrings from the stub that editors read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

STUB = Path(__file__).resolve().parents[2] / "sparsetir" / "script" / "tvmscript.pyi"


@cache
def signatures() -> dict[str, tuple[str, str]]:
    """Return the signature and the docstring of each name of the stub."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            signature = f"({ast.unparse(node.args)}){result}".replace("builtins.", "")
            found.setdefault(node.name, (signature, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ("", ast.get_docstring(node) or "")
    return found


class DialectNames(SphinxDirective):
    """Describe the names in the content, in their order; ``T.`` stands before each."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the descriptions."""
        lines: list[str] = []
        for name in " ".join(self.content).split():
            signature, doc = signatures()[name]
            kind = "function" if signature else "class"
            lines += [f"````{{py:{kind}}} {name}{signature}", ":no-index-entry:", "", *doc.splitlines(), "````", ""]
        section = nodes.Element()
        context = self.env.ref_context
        outer, context["py:module"] = context.get("py:module"), "T"  # classes in signatures are those of this module
        self.state.nested_parse(StringList(lines, str(STUB)), self.content_offset, section)
        context["py:module"] = outer
        self.env.note_dependency(str(STUB))
        return section.children


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension."""
    app.add_directive("dialect-names", DialectNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
