"""Files of prompts: JSON Lines, one prompt a line, as text or as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.vllm.names import TENANT_NAME


@dataclass(frozen=True)
class Prompt:
    """A prompt as a server gets it."""

    content: str | tuple[int, ...]
    """Text, or token ids."""
    model: str = ""
    """A model or adapter of the server; empty for the server's own model."""
    cache_salt: str | None = None
    """The tenant's, if there is one."""
    tenant: str = ""
    """The tenant's name; empty for none."""

    def digest(self) -> bytes:
        """16 bytes that another prompt does not have."""
        text = json.dumps([self.content, self.model, self.cache_salt, self.tenant])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, each once, in their order. The file is read as they are asked for.

    A line is a text, a list of token ids, or an object with one of both as ``prompt``. An object
    may also have ``model``, ``cache_salt`` and ``tenant``. Empty lines are left out.

    Raises:
        ConfigError: the file cannot be read, or a line is not a prompt.
    """
    seen: set[bytes] = set()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    prompt = _prompt(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
                if (digest := prompt.digest()) not in seen:
                    seen.add(digest)
                    yield prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; name a file of prompts"
        ) from error


def _prompt(line: Any) -> Prompt:
    fields = line if isinstance(line, dict) else {"prompt": line}
    content = fields.get("prompt")
    model, salt = fields.get("model", ""), fields.get("cache_salt")
    tenant = fields.get("tenant", "")
    if isinstance(content, list) and all(type(token) is int and token >= 0 for token in content):
        content = tuple(content)
    if not isinstance(content, (str, tuple)) or not content:
        raise ValueError("a prompt is a text or a list of token ids, and not empty")
    if not isinstance(model, str) or not isinstance(salt, str | None):
        raise ValueError("model and cache_salt are texts")
    if tenant != "" and not (isinstance(tenant, str) and TENANT_NAME.fullmatch(tenant)):
        raise ValueError("tenant is a name: 1 to 64 letters, digits, dots, dashes and underscores")
    for text in (content, model, salt):
        if isinstance(text, str):
            # JSON can hold halves of characters, and a request cannot.
            text.encode()
    return Prompt(content, model, salt, tenant)
