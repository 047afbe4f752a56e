"""LoRA adapters that the service knows by name: their files are read here, as engines read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.lookup.models import Lora
from penstock.vllm.adapters import content_digest, files_state, variant


class Adapters:
    """Adapters by name, with the digest of their content for each engine's options."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self._read: dict[tuple[str, str], tuple[object, Lora]] = {}

    def read(self, options: Iterable[str | None]) -> None:
        """Reads the adapters that are new or have changed. A digest is of all of an adapter's
        bytes, so this may take a while."""
        for each in options:
            for name, path in self._paths.items():
                if each is None:
                    continue
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
        """
        if not isinstance(lora, str):
            return lora
        if lora not in self._paths:
            raise ConfigError(
                f"no LoRA adapter {lora!r} was given to this service; ask with its name, path "
                "and digest, or start the service with --adapter NAME=PATH"
            )
        known = self._read.get((lora, options or ""))
        if known is not None and not known[1].digest:
            raise ConfigError(
                f"the files of the LoRA adapter {lora!r} cannot be read at {self._paths[lora]!r}: "
                "have them here at the same path as the engines have them"
            )
        # Without options no engine serves adapters, and the model refuses them.
        return known[1] if known is not None else Lora(lora, self._paths[lora], "")
