"""LoRA adapters that the service knows by name: their files are read here, as engines read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.lookup.models import Lora, Refused
from penstock.vllm.adapters import content_digest, files_state, variant

_MOST_OPTIONS = 32
"""Different options of engines that adapters are read for, each time whole."""


class Adapters:
    """Adapters by name, with the digest of their content for each engine's options."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self._options: list[str] = []
        self._read: dict[tuple[str, str], tuple[object, Lora]] = {}

    def read(self, options: Iterable[str | None]) -> None:
        """Reads the adapters that are new or have changed. A digest is of all of an adapter's
        bytes, so this may take a while. So no more than some options are read for: those that were
        first stay, whatever is described beside them."""
        wanted = {each for each in options if each is not None}
        kept = [each for each in self._options if each in wanted]
        new = sorted(wanted.difference(kept))
        self._options = (kept + new)[:_MOST_OPTIONS]
        self._read = {named: of for named, of in self._read.items() if named[1] in self._options}
        for each in self._options:
            for name, path in self._paths.items():
                try:
                    state: object = files_state(Path(path))
                except OSError:
                    state = None
                known = self._read.get((name, each))
                if known is None or known[0] != state:
                    digest = content_digest(Path(path), variant(each, is_3d=False))
                    self._read[name, each] = state, Lora(name, path, digest)

    def named(self, lora: Lora | str | None, options: str | None) -> Lora | None:
        """The adapter, given or by its name, for engines with these options.

        Raises:
            ConfigError: there is none of this name, or its files cannot be read.
            Refused: the pools describe too many options.
        """
        if not isinstance(lora, str):
            return lora
        if lora not in self._paths:
            raise ConfigError(
                f"no LoRA adapter {lora!r} was given to this service; ask with its name, path "
                "and digest, or start the service with --adapter NAME=PATH"
            )
        if options is not None and options not in self._options:
            raise Refused(
                f"the pools describe engines with more than {_MOST_OPTIONS} different options for "
                "LoRA adapters, and adapters are not read for this engine's; ask with the "
                "adapter's name, path and digest"
            )
        known = self._read.get((lora, options or ""))
        if known is not None and not known[1].digest:
            raise ConfigError(
                f"the files of the LoRA adapter {lora!r} cannot be read at {self._paths[lora]!r}: "
                "have them here at the same path as the engines have them"
            )
        # Without options no engine serves adapters, and the model refuses them.
        return known[1] if known is not None else Lora(lora, self._paths[lora], "")
