"""A pool behind a slow network, which has some prompts already, and engines that reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.engines import BLOCK, save_model
from lab.engines.node import Node
from lab.network import Way
from lab.servers import PoolServer

PATIENCE = {"penstock.load_timeout": 60.0}


class Behind:
    """A Valkey server, the way to it, and the engines behind it."""

    def __init__(self, folder: Path, stored: Sequence[list[int]]) -> None:
        """Has an engine that is near the server store these prompts."""
        self._folder = folder
        self._model = save_model(folder)
        with contextlib.ExitStack() as ending:
            server = ending.enter_context(PoolServer("valkey", folder))
            self.way = ending.enter_context(Way(server.port))
            with self._node("first", server.tcp_url, {}) as first:
                for prompt in stored:
                    first.ask(prompt, max_tokens=1)
                blocks = sum(len(prompt) // BLOCK for prompt in stored)
                first.wait_for("stored_blocks", blocks, timeout=600)
            self._ending = ending.pop_all()

    def close(self) -> None:
        """Ends the engines, the network and the pool."""
        self._ending.close()

    def engine(self, name: str, settings: dict[str, Any], **options: Any) -> Node:
        """Starts an engine. `settings` are Penstock's; other options are vLLM's."""
        node = self._node(name, f"redis://127.0.0.1:{self.way.port}", settings, **options)
        self._ending.callback(node.kill)
        node.wait_ready()
        return node

    def _node(self, name: str, pool: str, settings: dict[str, Any], **options: Any) -> Node:
        ours = {f"penstock.{key}": value for key, value in settings.items()}
        log = self._folder / f"{name}.log"
        settings = PATIENCE | ours
        return Node(
            self._model, log, pool=pool, settings=settings, env=ENGINE_ENVIRONMENT, **options
        )
