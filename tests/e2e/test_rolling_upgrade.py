"""A rolling upgrade: engines of the version before and of this one, over one pool.

The two name their namespaces by different facts, so neither loads what the other stored.

``scripts/version-before.sh`` builds the version before, and runs these tests with it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lab.engines.node import STORE_LIMITS, Node
from lab.waiting import LIMIT, eventually
from tests.e2e.conftest import BLOCK, tokens
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
COUNTED = ("stored_blocks", "stores_failed", "stores_dropped")


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


def stored(node: Node, prompt: list[int], before: dict[str, float]) -> None:
    """Waits until the pool has a prompt's blocks. The old engine's limits are short, so it may lose
    some on a busy machine: these are computed and stored again."""

    def are_stored() -> bool:
        now = node.counters()
        count = {name: now.get(name, 0) - before.get(name, 0) for name in COUNTED}
        if count["stored_blocks"] >= REACHABLE // BLOCK:
            return True
        if any(count[name] for name in COUNTED[1:]):
            node.forget()
            node.ask(prompt)
        else:
            # An idle engine reports with its next step.
            node.ask([7, 8, 9], max_tokens=2)
        return False

    eventually(are_stored, node.counters, seconds=2 * LIMIT, pause=0.05)


def test_two_versions_with_other_namespaces_leave_each_other_alone(
    pool: str, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    assert BEFORE is not None
    prompts = [tokens(LENGTH, seed=11_000 + n) for n in range(2)]
    # Whole prompts with the second pool too: some CPUs round a prompt's end otherwise after a hit.
    plain.forget()
    expected = [plain.ask(prompt) for prompt in prompts]
    before = {"pool": pool, "env": {"PYTHONPATH": BEFORE}, "settings": dict.fromkeys(STORE_LIMITS)}
    old = Node(llama, tmp_path / "before.log", **before)
    with old, start(llama, pool=pool) as new:
        assert any(BEFORE in path for path in modules(old)), "this is not the version before"
        assert not any(BEFORE in path for path in modules(new))
        # Each computes what only the other has stored, and then finds its own.
        for node, prompt in ((old, 0), (new, 1), (new, 0), (old, 1)):
            counted = node.counters()
            answer = node.ask(prompts[prompt])
            assert (answer.cached, answer.text) == (0, expected[prompt].text)
            stored(node, prompts[prompt], counted)
        for node in (old, new):
            node.forget()
            for prompt, answer in zip(prompts, expected, strict=True):
                found = node.ask(prompt)
                assert (found.cached, found.tokens) == (REACHABLE, answer.tokens)
            assert node.counters().get("load_failed_blocks", 0) == 0

        # The upgrade goes on: the old engine ends, and both versions' blocks stay.
        old.stop()
        new.forget()
        assert [new.ask(prompt).cached for prompt in prompts] == [REACHABLE, REACHABLE]
        assert new.counters().get("load_failed_blocks", 0) == 0
    again = Node(llama, tmp_path / "again.log", **before)
    with again:
        assert [again.ask(prompt).cached for prompt in prompts] == [REACHABLE, REACHABLE]
