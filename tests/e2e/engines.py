"""The engines of a test run: one that a test has left goes on with the next test.

It gets a new connector, with the pool and the settings that the next test asks for, an empty prefix
cache, counters at nothing and a log of its own (`lab.engines.exchange`). It has to fit: all that
vLLM decides when it starts must be as the test asks for.

A test in which another *process* must go on, and not only another engine, asks for a `fresh` one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lab.engines.forks import Fork
from lab.engines.node import Node

IDLE = 2
"""So many engines wait for a next test at most. Each takes some hundred megabytes, and two or three
hundredths of a core for threads of PyTorch that look for messages."""


class Engines:
    """Starts engines, or hands out such as are left. Logs lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs = 0
        self._idle: list[tuple[str, Node]] = []
        """With what each can be asked for, the one that was used last at the end."""

    def get(self, model: Path, *, ready: bool = True, fresh: bool = False, **options: Any) -> Node:
        """An engine that nobody else has. With `ready`, it serves already."""
        log = self._folder / f"node-{self._logs}.log"
        self._logs += 1
        found = _key(model, options)
        if found is not None and not fresh:
            for place, (key, node) in enumerate(self._idle):
                if key == found:
                    del self._idle[place]
                    try:
                        node.renew(log, options["pool"], options.get("settings"))
                    except BaseException:
                        node.kill()
                        raise
                    return node
        node = Node(model, log, launch=Fork, **options)
        if found is not None:
            node.keep = lambda node: self._keep(found, node)
        if ready:
            node.wait_ready()
        return node

    def has(self, node: Node) -> bool:
        """Whether it waits for a next test."""
        return any(node is idle for _, idle in self._idle)

    def close(self) -> None:
        """Ends all engines that nobody has."""
        for _, node in self._idle:
            node.kill()
        self._idle.clear()

    def _keep(self, key: str, node: Node) -> bool:
        if not node.is_renewable or not node.part():
            return False
        self._idle.append((key, node))
        if len(self._idle) > IDLE:
            _, oldest = self._idle.pop(0)
            oldest.kill()
        return True


VARIABLE = "PENSTOCK_TEST_ENGINES"
"""With `fresh` in it, every test has an engine of its own: to tell what a failure comes from."""

OF_ITS_OWN = {"prepare", "worker_extension_cls", "kv_events_config", "data_parallel_size"}
"""Options of engines that nobody else gets: each is about its processes, or numbers what it says
from its start on."""


def _key(model: Path, options: dict[str, Any]) -> str | None:
    """What an engine has to be asked for by to get one that somebody else had. None if it is of no
    use to others: those without a connector have none to exchange."""
    if os.environ.get(VARIABLE) == "fresh":
        return None
    if options.get("pool") is None or OF_ITS_OWN & options.keys():
        return None
    fixed = {key: value for key, value in options.items() if key not in ("pool", "settings")}
    # The connector's settings that vLLM's own start depends on.
    fixed["penstock.kv_layout"] = (options.get("settings") or {}).get("penstock.kv_layout")
    # A test may change a model's files between two engines.
    files = [
        (file.name, status.st_size, status.st_mtime_ns)
        for file in sorted(model.rglob("*"))
        if file.is_file()
        for status in [file.stat()]
    ]
    return json.dumps([str(model), files, fixed], sort_keys=True, default=str)
