"""What `benches.exactness` counts, and how its cells are made."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benches import exactness
from benches.exact.cell import Cell, Looked, compare
from benches.exact.families import FAMILIES, ON_CUDA, ROOT_BLOCKS, Family
from benches.exact.faults import EVIDENCE, FAULTS
from benches.exact.pools import Files
from lab.engines.node import Answer

SAID = Answer((5, 6), (-1.0, -2.0), 128, "length", 0.0)


class Known:
    """A reference that says the same to every prompt, but for hits of one length."""

    def __init__(self, other: int = -1) -> None:
        self._other = other

    def own_hit(self, prompt: list[int], count: int) -> Answer:
        return Answer((5, 6), (-1.0, -2.5 if count == self._other else -2.0), count, "length", 0.0)


class NoEngines:
    """Stands where a cell has engines; none is asked for."""

    family = FAMILIES["llama"]


def cell(*looked: Looked) -> Cell:
    return Cell(NoEngines(), 10, 1.0, list(looked))  # type: ignore[arg-type]


def found(looked: Looked, other: int = -1) -> dict[str, Any]:
    return compare(cell(looked), Known(other))  # type: ignore[arg-type]


def test_a_bit_of_a_logprob_is_a_difference() -> None:
    hit = Looked((1,) * 200, SAID, loaded=128, failed=0)
    assert (found(hit)["hits"], found(hit)["hits_differ"]) == (1, 0)
    assert found(hit)["hits_by_cached_tokens"] == {"128": 1}
    differing = found(hit, other=128)
    assert (differing["hits"], differing["hits_differ"]) == (1, 1)
    assert differing["hits_differ_in_tokens"] == 0
    assert differing["examples"][0]["own_logprobs"] == (-1.0, -2.5)


def test_what_was_not_loaded_is_no_hit() -> None:
    computed = found(Looked((1,) * 200, SAID, loaded=0, failed=0), other=128)
    assert (computed["hits"], computed["computed"], computed["computed_differ"]) == (0, 1, 1)
    # Part of what was refused may have been used: any length is right.
    refused = found(Looked((1,) * 200, SAID, loaded=128, failed=1), other=128)
    assert (refused["hits"], refused["rejected"], refused["rejected_differ"]) == (0, 1, 0)


def test_a_request_that_ends_with_an_error_has_no_answer() -> None:
    error = Answer((), (), 128, "error", 0.0)
    counts = found(Looked((1,) * 200, error, loaded=128, failed=0))
    assert (counts["unanswered"], counts["hits"], counts["hits_differ"]) == (1, 0, 0)


def test_parts_of_a_root_are_of_all_lengths() -> None:
    one = cell()
    block = one.family.block
    assert [len(part) // block for part in one.parts(3)] == list(range(ROOT_BLOCKS, 0, -1))
    for part in one.parts(3):
        assert one.root(3)[: len(part)] == part
        assert len(part) % block
    assert one.root(3)[:block] != one.root(4)[:block]


def test_prompts_with_phrases_repeat_themselves() -> None:
    assert len(set(zip(*[iter(FAMILIES["ngram"].tokens(46, "x"))] * 23, strict=True))) == 1
    assert len(FAMILIES["ngram"].tokens(500, "x")) == 500


def row(family: str, fault: str, **more: Any) -> dict[str, Any]:
    numbers = ("hits", "hits_differ", "rejected", "rejected_differ", "computed", "computed_differ")
    return {"family": family, "pool": "file", "fault": fault, "seen": {}, "seconds": 1.0} | {
        **dict.fromkeys(numbers, 0),
        **more,
    }


def test_a_fault_that_did_not_happen_is_shown() -> None:
    rows = [row("llama", fault, seen={EVIDENCE[fault]: 3}) for fault in FAULTS]
    assert "did not happen" not in exactness.table(rows)
    rows[0]["seen"] = {}
    assert exactness.table(rows).count("did not happen") == 1


def test_cells_are_added_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    args = argparse.Namespace(add=True, json=file, environment={"date": "1"})
    first = exactness.added(args, [row("llama", "abort"), row("lfm2", "abort", hits=1)])
    assert [each["family"] for each in first["rows"]] == ["lfm2", "llama"]
    file.write_text(json.dumps(first))
    args.environment = {"date": "2"}
    second = exactness.added(args, [row("lfm2", "abort", hits=2)])
    assert [(each["hits"], each["run"]) for each in second["rows"]] == [(2, 1), (0, 0)]
    assert second["runs"] == [{"date": "1"}, {"date": "2"}]


def test_files_are_damaged_in_one_bit(tmp_path: Path) -> None:
    import random

    pool = Files()
    pool.start(tmp_path)
    (tmp_path / "pool").mkdir()
    for number in range(10):
        (tmp_path / "pool" / str(number)).write_bytes(bytes(3000))
    (tmp_path / "pool" / "description").write_bytes(bytes(100))
    assert pool.evicted() == 0
    assert pool.damage(random.Random(1), 0.3) == 3
    contents = [path.read_bytes() for path in (tmp_path / "pool").iterdir()]
    assert sum(byte.bit_count() for content in contents for byte in content) == 3
    assert sorted(map(len, contents)) == [100] + [3000] * 10
    (tmp_path / "pool" / "3").unlink()
    assert pool.evicted() == 1


def test_a_cell_is_good_if_hits_are_the_same_and_the_fault_was_seen() -> None:
    good = {"fault": "corruption", "hits": 3, "hits_differ": 0, "seen": {"rejected_objects": 1}}
    assert exactness.is_good(good)
    for change in (
        {"hits": 0},
        {"hits_differ": 1},
        {"computed_differ": 1},
        {"unanswered": 1},
        {"seen": {}},
        {"failure": "fails on the way"},
    ):
        assert not exactness.is_good(good | change)


def test_every_family_says_how_it_is_served() -> None:
    for family in (*FAMILIES.values(), *ON_CUDA.values()):
        assert isinstance(family, Family)
        # Else prompts are computed in other pieces with a hit than without one.
        assert family.engine["max_num_batched_tokens"] == family.engine["block_size"]
