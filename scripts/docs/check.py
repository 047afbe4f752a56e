"""Checks a built site: all that pages link to or show is there, nothing comes from elsewhere.

Usage: python -m scripts.docs.check FOLDER
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page refers to, what can be referred to in it, and what it makes a browser fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called with each element."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "src" in given:
            self.fetched.add(given["src"])
        if "href" in given:
            is_fetched = tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload")
            (self.fetched if is_fetched else self.links).add(given["href"])


def faults(site: Path) -> list[str]:
    """What is wrong with the site in this folder, in words."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in sorted(page.links | page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.fetched and parts.scheme != "data":
                    found.append(f"{where}: fetches {link}")
                continue
            # The page for what is not found is shown anywhere, so its links begin at the root.
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{where}: {link} is not there")
            elif parts.fragment and target in pages and not _has(pages[target], parts.fragment):
                found.append(f"{where}: {link} has no such place")
    return found


def _has(page: Page, fragment: str) -> bool:
    return unquote(fragment) in page.anchors or fragment.startswith("__")


def main() -> int:
    """Prints what is wrong; 1 if anything is."""
    site = Path(sys.argv[1]).resolve()
    wrong = faults(site)
    print("\n".join(wrong) or f"site: {len(list(site.rglob('*.html')))} pages, all links lead on")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
