# SPDX-License-Identifier: Apache-2.0
"""Link check of the built site: each link leads to a file and an anchor of it, and pages load nothing from a network.

`python docs/_ext/check_site.py build/site` prints what is wrong and fails. Links to other sites are only counted.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REMOTE = ("http", "https")
# What a browser fetches by itself; a link of these kinds only names an address.
NAMES_ONLY = {"canonical", "next", "prev", "search", "index", "license", "author"}


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the ids, the links, and what the page loads."""
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag == "link" and "href" in values and values.get("rel") not in NAMES_ONLY:
            self.loaded.add(values["href"])
        if tag != "a" and "src" in values:
            self.loaded.add(values["src"])


def check(site: Path) -> tuple[list[str], int, int]:
    """Return what is wrong with the pages below a folder, the number of links inside, and of those to other sites."""
    # The theme keeps templates among the static files.
    files = [path.resolve() for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in files}
    wrong, inside, outside = [], 0, 0
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        wrong += [f"{name} loads {link} from a network" for link in page.loaded if urlsplit(link).scheme in REMOTE]
        for link in sorted(page.links | page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += parts.scheme in REMOTE
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file():
                wrong.append(f"{name}: no file {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in anchors:
                wrong.append(f"{name}: no anchor {link}")
    return wrong, inside, outside


def main(arguments: list[str]) -> int:
    """Check the site in the folder that is given; return the exit status."""
    wrong, inside, outside = check(Path(arguments[0]))
    print(*wrong, f"{inside} links, {len(wrong)} wrong; {outside} to other sites, not followed", sep="\n")
    return bool(wrong or not inside)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
