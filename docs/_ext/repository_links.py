# SPDX-License-Identifier: Apache-2.0
"""Links of the pages to files of the repository: copied into the site, so that each link leads somewhere offline."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?P<path>(?!https?:|mailto:|#)[^)#\s]+)(?P<anchor>#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# Documents at the root that are pages of the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
GALLERY = "examples/gallery/"


def rewrite(text: str, docs: Path, folder: Path) -> str:
    """Turn relative links from `folder` to files outside of `docs` into downloads, and root documents into pages."""

    def link(match: re.Match[str]) -> str:
        path = (folder / match["path"]).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"](/{PAGES[name]})"
        if name.startswith(GALLERY):
            return f"](/gallery/{path.stem}.rst)"
        if path.is_relative_to(docs):
            return f"](/{path.relative_to(docs).as_posix()}{match['anchor'] or ''})"
        # A leading slash would be taken from docs; only a file can be downloaded.
        return f"](path:{os.path.relpath(path, docs)})" if path.is_file() else match[0]

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def read_source(app: Any, name: str, source: list[str]) -> None:
    """Rewrite the links of a page; pages that stand for a document at the root take its text."""
    docs = Path(app.srcdir)
    origin = {page.removesuffix(".md"): root for root, page in PAGES.items()}.get(name)
    folder = ROOT if origin else docs / Path(name).parent
    text = (ROOT / origin).read_text(encoding="utf-8") if origin else source[0]
    source[0] = rewrite(text, docs, folder)


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension."""
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
