"""Values that are not what their key says are counted and never loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

PROMPT = tokens(5 * BLOCK + 9, seed=7)
HEADER = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def node(llama: Path, folder: Path, start: Callable[..., Node]) -> Iterator[Node]:
    with start(llama, pool=f"file://{folder}?size=1GiB") as node:
        yield node


def objects(folder: Path) -> list[Path]:
    """The files of KV blocks (they are the largest), in a fixed order."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 50_000)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def truncate(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])


def empty(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(b"")


def lengthen(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(path.read_bytes() + b"\0")


def flip_header(files: list[Path]) -> None:
    for i, path in enumerate(files):
        flip(path, i * 11 % HEADER)


def flip_payload(files: list[Path]) -> None:
    for i, path in enumerate(files):
        flip(path, HEADER + i * 40_001 % (path.stat().st_size - HEADER))


def swap(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def other_version(files: list[Path]) -> None:
    for path in files:
        data = bytearray(path.read_bytes())
        data[4:6] = (int.from_bytes(data[4:6], "little") + 1).to_bytes(2, "little")
        path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [truncate, empty, lengthen, flip_header, flip_payload, swap, other_version]
)
def test_a_damaged_value_is_never_loaded(
    damage: Callable[[list[Path]], None], node: Node, plain: Node, folder: Path
) -> None:
    expected = plain.ask(PROMPT)
    node.forget()
    node.ask(PROMPT)
    _wait_until_whole(node, folder)
    damage(objects(folder))
    node.forget()
    before = node.counters()

    answer = node.ask(PROMPT)

    after = node.counters()
    assert answer.tokens == expected.tokens
    assert after.get("rejected_objects", 0) > before.get("rejected_objects", 0)
    assert after.get("loaded_tokens", 0) == before.get("loaded_tokens", 0)
    assert after.get("load_failed_blocks", 0) > before.get("load_failed_blocks", 0)

    # What was damaged has been replaced: the next look-up hits again.
    _wait_until_whole(node, folder)
    node.forget()
    healed = node.ask(PROMPT)
    assert healed.cached == 5 * BLOCK
    assert healed.tokens == expected.tokens


def _wait_until_whole(node: Node, folder: Path) -> None:
    """Until all five blocks load and verify."""
    for _ in range(100):
        node.forget()
        before = node.counters()
        answer = node.ask(PROMPT)
        after = node.counters()
        if answer.cached == 5 * BLOCK and after.get("load_failed_blocks", 0) == before.get(
            "load_failed_blocks", 0
        ):
            return
    pytest.fail(f"the pool never became whole: {sorted(folder.rglob('*'))}")


def test_only_blocks_before_the_damage_are_loaded(node: Node, plain: Node, folder: Path) -> None:
    plain.ask(PROMPT)
    _wait_until_whole(node, folder)
    before = node.counters()
    flip(objects(folder)[2], HEADER + 5)
    node.forget()
    assert node.ask(PROMPT).tokens == plain.ask(PROMPT).tokens
    after = node.counters()
    assert 0 < after["load_failed_blocks"] - before.get("load_failed_blocks", 0) <= 5
    assert after["rejected_objects"] - before.get("rejected_objects", 0) == 1
