"""What mkdocs does for the site beside what mkdocs.yml says.

- Pages in the project's root (README, ARCHITECTURE, CHANGELOG, …) are pages of the site. The README
  is its front page.
- The reference is generated (`reference.py`).
- A folder without an index gets one that lists its pages.
- An entry of the navigation that ends in `/` stands for that folder's pages without an entry, `./`
  for those of the root. An index of a folder that there is not is left out.
- Short code stays in one line.
- A link to a file outside the site leads to the repository if pyproject.toml names one. Otherwise
  only its text stays.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from scripts.docs import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _outside() -> dict[str, str]:
    """File in the project's root → page of the site."""
    found = {path.name: path.name.lower() for path in sorted(ROOT.glob("*.md"))}
    return {**found, "README.md": "index.md"}


def _repository() -> str | None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.search(r'^(?:repository|source) = "(https://[^"]+)"', project, re.M | re.I)
    return named and named[1]


OUTSIDE = _outside()
REPOSITORY = _repository()


def on_config(config: Any) -> Any:
    """Fills folders into the navigation."""
    named = set(_entries(config.nav))
    config.nav = _filled(config.nav, named)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/ as they are."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for page, make in reference.PAGES.items():
        files.append(File.generated(config, page, content=make()))
    for folder in _folders():
        if not (DOCS / _index_of(folder)).exists():
            files.append(File.generated(config, _index_of(folder), content=_index(folder)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the project into links between pages of the site."""
    here = page.file.src_uri
    inverse = {page: name for name, page in OUTSIDE.items()}
    source = inverse.get(here, f"docs/{here}")

    def replaced(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        address = _address(path, posixpath.dirname(here))
        return text if address is None else f"{mark}[{text}]({address}{hash_}{anchor})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keeps short code in one line: browsers would tear `--option` after its first hyphen."""
    return re.sub(r"<code>(?=[^<\n]{1,32}</code>)", '<code class="short">', html)


def _address(path: str, folder: str) -> str | None:
    """Where a link from a page in `folder` to a file of the project leads."""
    inside = path.removeprefix("docs/")
    if path in OUTSIDE:
        inside = OUTSIDE[path]
    elif (ROOT / path).is_dir() and inside in _folders():
        inside = _index_of(inside)
    elif inside == path:
        return REPOSITORY and f"{REPOSITORY.rstrip('/')}/blob/HEAD/{path}"
    return posixpath.relpath(inside, folder or ".")


def _folders() -> list[str]:
    """Folders of docs/ that have pages."""
    found = {path.parent.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    return sorted(found - {"."})


def _index_of(folder: str) -> str:
    """The page that lists a folder's pages; made here if there is none."""
    made = f"{folder}/index.md"
    pages = (made, f"{folder}/README.md", f"{folder}.md")
    return next((page for page in pages if (DOCS / page).exists()), made)


def _index(folder: str) -> str:
    """Such a page for a folder that has none."""
    pages = [*sorted((DOCS / folder).glob("*.md")), *sorted((DOCS / folder).glob("*/index.md"))]
    links = [f"- [{_title(path)}]({path.relative_to(DOCS / folder)})" for path in pages]
    generated = [page for page in reference.PAGES if page.startswith(f"{folder}/")]
    links += [
        f"- [{reference.PAGES[page]().partition(chr(10))[0].removeprefix('# ')}]"
        f"({posixpath.relpath(page, folder)})"
        for page in generated
    ]
    return "\n".join([f"# {folder.rpartition('/')[2].capitalize()}", "", *links, ""])


def _title(path: Path) -> str:
    heading = re.search(r"^# (.*)$", path.read_text(), re.MULTILINE)
    return heading[1] if heading else path.stem


def _entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, str):
            yield value
        else:
            yield from _entries(value)


def _filled(nav: list[Any], named: set[str]) -> list[Any]:
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            [(title, value)] = entry.items()
            inside = value if isinstance(value, str) else _filled(value, named)
            filled += [{title: inside}] if inside else []
        elif entry == "./":
            outside = set(OUTSIDE.values()) | {path.name for path in DOCS.glob("*.md")}
            filled += sorted(outside - named)
        elif entry.endswith("/"):
            pages = {path.relative_to(DOCS).as_posix() for path in (DOCS / entry).glob("*.md")}
            filled += sorted(pages - named - {_index_of(entry.rstrip("/"))})
        elif entry.endswith("/index.md"):
            folder = entry.removesuffix("/index.md")
            filled += [_index_of(folder)] if folder in _folders() else []
        else:
            filled.append(entry)
    return filled
