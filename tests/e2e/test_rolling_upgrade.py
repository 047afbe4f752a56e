"""A rolling upgrade: engines of the version before and of this one share a pool.

``scripts/version-before.sh`` builds the version before, and runs these tests with it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node
from tests.servers import Server

BEFORE = os.environ.get("PENSTOCK_TEST_BEFORE")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        BEFORE is None,
        reason="the version before is not here (scripts/version-before.sh builds it)",
    ),
]

LENGTH = 5 * BLOCK + 60
REACHABLE = 5 * BLOCK


@pytest.fixture(params=["valkey", "shm-file"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Pools by whose formats both versions must go: RESP, shared memory, files."""
    if request.param == "valkey":
        with Server("valkey", tmp_path) as server:
            yield server.unix_url
        return
    name = f"test-{uuid.uuid4().hex}"
    try:
        yield f"shm://{name}?size=256MiB file://{tmp_path}/pool?size=1GiB"
    finally:
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


def modules(node: Node) -> list[str]:
    """Files that the processes of an engine have in memory: programs, libraries, native modules."""
    engine = psutil.Process(node.process.pid)
    return [file.path for process in (engine, *engine.children()) for file in process.memory_maps()]


def test_each_version_loads_what_the_other_stored(
    pool: str, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    assert BEFORE is not None
    prompts = [tokens(LENGTH, seed=11_000 + n) for n in range(3)]
    expected = [plain.ask(prompt) for prompt in prompts]
    old = Node(llama, tmp_path / "before.log", pool=pool, env={"PYTHONPATH": BEFORE})
    with old, start(llama, pool=pool) as new:
        assert any(BEFORE in path for path in modules(old)), "this is not the version before"
        assert not any(BEFORE in path for path in modules(new))
        assert old.ask(prompts[0]).text == expected[0].text
        old.wait_for("stored_blocks", REACHABLE // BLOCK)
        assert new.ask(prompts[1]).text == expected[1].text
        new.wait_for("stored_blocks", REACHABLE // BLOCK)
        for node, prompt, answer in ((new, 0, expected[0]), (old, 1, expected[1])):
            found = node.ask(prompts[prompt])
            assert found.tokens == answer.tokens
            assert found.cached == REACHABLE
        for node in (old, new):
            node.wait_for("loaded_tokens", REACHABLE)
            counters = node.counters()
            assert counters["loaded_tokens"] == REACHABLE
            assert counters.get("load_failed_blocks", 0) == 0
            # What the other has stored already is not stored again.
            assert counters["stored_blocks"] == REACHABLE // BLOCK

        # The upgrade goes on: the old engine ends, and what it stored stays.
        old.stop()
        assert new.ask(prompts[2]).text == expected[2].text
        new.forget()
        assert new.ask(prompts[1]).cached == REACHABLE
        assert new.ask(prompts[0]).cached == REACHABLE
        assert new.counters().get("load_failed_blocks", 0) == 0
