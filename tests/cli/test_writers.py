"""What `penstock doctor` says of engines that have found others' KV to be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from penstock._native import Store
from penstock.cli import main
from penstock.cli.findings import Finding
from penstock.cli.writers import of_marks
from penstock.pool.namespace import ROLL, object_key, publish_namespace

WRONG, RIGHT, THIRD, FOURTH = 0xA1, 0xB2, 0xC3, 0xD4
NAMESPACE = b"n" * 16
AT = 1_800_000_000
# XXH3-64 of nothing, as `docs/reference/values.md` says.
CHUNK = 0x2D06800538D394C2.to_bytes(8, "little")


def pool(folder: Path, *marks: tuple[int, int, int]) -> str:
    """A pool with a roll of these marks: writer, witness, and seconds since 1970."""
    url = f"file://{folder}/pool?size=64MiB"
    roll = b"".join(struct.pack("<QQQ", *mark) + NAMESPACE for mark in marks)
    Store.open(url).put(object_key(ROLL, CHUNK), roll, timeout=60.0)
    return url


def found(url: str) -> list[Finding]:
    return list(of_marks(Store.open(url), 60.0))


def test_a_pool_without_marks_says_nothing(tmp_path: Path) -> None:
    assert found(f"file://{tmp_path}/pool?size=64MiB") == []


def test_a_mark_names_both_engines_the_time_and_the_model(tmp_path: Path) -> None:
    url = pool(tmp_path, (WRONG, RIGHT, AT))
    publish_namespace(Store.open(url), NAMESPACE, {"model": "llama"}, timeout=60.0)
    [finding] = found(url)
    assert finding.level == "warn"
    for part in ("writer 00000000000000a1", "engine 00000000000000b2", "model llama"):
        assert part in finding.message
    assert "2027-01-15 08:00:00 UTC" in finding.message
    assert finding.message.endswith("Nothing of that writer is loaded")
    assert "restart the one that is wrong" in finding.advice


def test_marks_that_do_not_count_say_why(tmp_path: Path) -> None:
    itself = [(writer, WRONG, AT) for writer in (RIGHT, THIRD, FOURTH, WRONG)]
    for one in found(pool(tmp_path / "itself", *itself)):
        assert "does not count: that engine disagrees with others" in one.message
    by_two = pool(tmp_path / "two", (WRONG, RIGHT, AT), (WRONG, THIRD, AT), (FOURTH, WRONG, AT))
    *counting, last = found(by_two)
    assert [one.level for one in counting] == ["warn", "warn"]
    assert (last.level, last.advice) == ("note", "")
    assert "others have found that engine to be wrong" in last.message


def test_the_newest_marks_are_told_of_first_and_not_all(tmp_path: Path) -> None:
    marks = [(number, number + 1000, AT + number) for number in range(1, 101)]
    *shown, rest = found(pool(tmp_path, *marks))
    assert len(shown) == 20
    assert f"writer {100:016x}" in shown[0].message
    assert rest.message.startswith("80 more")


@pytest.mark.parametrize("at", [2**64 - 1, 2**63, 10**12, 0])
def test_any_time_may_be_in_a_mark(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = pool(tmp_path, (WRONG, RIGHT, at))
    assert main(["doctor", url, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["findings"]
    [finding] = [one for one in said if one["check"] == "writers"]
    assert ("1970-01-01" if at == 0 else "at no valid time") in finding["message"]
