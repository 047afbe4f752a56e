"""Fetches a package's source distribution from wherever pip gets packages.

pip has no command for it: `pip download` builds the metadata, which takes all that building the
package takes. So this calls what pip itself finds and fetches packages with.

Usage: fetch-sdist.py NAME VERSION FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.specifiers import SpecifierSet


def main(name: str, version: str, file: Path) -> None:
    """Writes the distribution into a file."""
    command = DownloadCommand("download", "fetches packages")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", name])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        found = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
        if found is None:
            sys.exit(f"there is no source distribution of {name} {version}")
        answer = session.get(found.link.url_without_fragment, stream=True)
        answer.raise_for_status()
        with file.open("wb") as out:
            for part in answer.iter_content(1 << 20):
                out.write(part)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
