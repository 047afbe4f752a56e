"""The parts of `penstock.sglang` that work without SGLang."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.network import LIMIT, Way
from penstock.cli import main
from penstock.pool.namespace import RENEWED_SECONDS
from penstock.sglang.counters import COUNTERS, Counters
from penstock.sglang.hits import ALL_PAGES, TRAILING_PAGES, SidePool, leading, reach
from penstock.sglang.pages import Loan
from penstock.sglang.settings import SGLANG_KEYS, Settings
from penstock.sglang.store import Object, PageStore, object_name
from tests.clock import Clock
from tests.servers import Server

FLAGS = st.lists(st.booleans(), max_size=12)


def test_the_room_needs_neither_engine() -> None:
    """Nothing of vLLM, SGLang or torch is imported before the backend is asked for."""
    code = (
        "import json, sys; sys.modules['vllm'] = sys.modules['sglang'] = None\n"
        "import penstock.sglang, penstock.sglang.hits, penstock.sglang.compat\n"
        "print(json.dumps([penstock.sglang.compat.version(), sorted(sys.modules)]))\n"
        "try: penstock.sglang.PenstockStorage\n"
        "except ImportError as error: print(error.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    _, loaded = json.loads(first)
    assert not {"torch", "penstock.vllm", "penstock.sglang.backend"} & set(loaded)
    assert second.startswith("sglang")


def test_an_unknown_name_of_the_room() -> None:
    import penstock.sglang

    with pytest.raises(AttributeError, match="no attribute 'Storage'"):
        _ = penstock.sglang.Storage


@given(FLAGS, FLAGS, st.integers(0, 5))
def test_reach_is_what_its_words_say(kv: list[bool], side: list[bool], window: int) -> None:
    side = (side + [False] * len(kv))[: len(kv)]
    kv_pages = leading(kv)
    assert all(kv[:kv_pages])
    assert kv_pages == len(kv) or not kv[kv_pages]
    pools = [
        SidePool("all", ALL_PAGES, side),
        SidePool("window", TRAILING_PAGES, side, window),
        SidePool("groups", "block_groups", [False] * len(kv)),
    ]
    for chosen in ([pools[0]], [pools[1]], pools[:2], pools):
        found = reach(kv_pages, chosen)
        names = {pool.name for pool in chosen}
        possible = [
            pages
            for pages in range(1, kv_pages + 1)
            if ("all" not in names or all(side[:pages]))
            and ("window" not in names or all(side[max(0, pages - max(1, window)) : pages]))
        ]
        assert found.possible == possible
        assert found.pages == max(possible, default=0)
        assert "groups" not in found.by_pool


def test_keys_of_sglang_are_not_ours() -> None:
    extra = dict.fromkeys(SGLANG_KEYS, 1) | {"pool": "memory://?size=1MiB"}
    assert Settings.parse(extra).load_deadline(64 << 20) == 1.5
    assert Settings.parse(extra).store_deadline(64 << 20) == 6.0
    assert Settings.parse({}, {"PENSTOCK_POOL": "shm://kv"}).pool == "shm://kv"
    assert "secret" not in repr(Settings.parse({"pool": "valkey://:secret@host"}))


def test_who_waits_longer_for_an_answer_waits_as_long_for_a_connection(
    valkey_server: Server,
) -> None:
    with Way(valkey_server.port) as way:
        # A server's first answer takes longer than the second that a connection may take otherwise.
        way.be(delay=0.6)
        settings = Settings(f"valkey://127.0.0.1:{way.port}", lookup_timeout=LIMIT)
        store = PageStore(settings, Counters(lambda *_: None))
        assert store.contains([object_name(bytes(16), "x")], timeout=LIMIT) == [False]


def test_namespaces_are_described_again_while_objects_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "penstock.sglang.store")
    described: list[tuple[float, bytes]] = []
    monkeypatch.setattr(
        "penstock.sglang.store.publish_namespace",
        lambda store, namespace, description, **_: described.append((clock.now, namespace)),
    )
    store = PageStore(Settings("memory://?size=1MiB"), Counters(lambda *_: None))
    first, second = bytes(16), b"b" * 16
    keys = itertools.count()

    def put() -> None:
        name = object_name(first, str(next(keys)))
        assert store.put([Object(name, Loan([b"page"], 4))]) == ([True], 4)

    store.describe(first, {})
    put()
    store.describe(second, {})
    clock.now += RENEWED_SECONDS - 1
    put()
    put()
    assert described == [(100, first), (399, first), (399, second)]
    clock.now += RENEWED_SECONDS
    put()
    assert described[3:] == [(699, first), (699, second)]


def test_names_of_objects() -> None:
    first, second = b"a" * 16, b"b" * 16
    names = [
        object_name(space, key, share)
        for space in (first, second)
        for key in ("x", "y")
        for share in (None, 0, 1)
    ]
    assert len(set(names)) == len(names)


def test_every_count_has_a_description() -> None:
    heard: list[tuple[str, int]] = []
    counters = Counters(lambda name, amount: heard.append((name, amount)))
    counters.count("stored_pages", 3)
    counters.count("stored_pages", 0)
    assert heard == [("stored_pages", 3)]
    assert counters.all() == dict.fromkeys(COUNTERS, 0) | {"stored_pages": 3}


def test_doctor_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    assert main(["doctor", "--sglang"]) == 1
    assert "SGLang is not installed" in capsys.readouterr().out
