"""SGLang's own threads back up to a pool and prefetch from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.mem_cache.utils import get_storage_hash_str

from lab.waiting import eventually
from tests.servers import Server
from tests.sglang.engines import LAYOUTS, PAGE, Engine, prompt

PAGES = 6


def hashes(key: object) -> list[str]:
    """The names of a prompt's pages. SGLang compiles the code for it, once."""
    try:
        found = get_storage_hash_str(key, page_size=PAGE)
    except RuntimeError as error:
        pytest.skip(f"SGLang's hash needs a C++ compiler and OpenSSL's headers: {error}")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backup_and_prefetch(layout: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    key = prompt(PAGES * PAGE)
    with Engine(url, layout) as first, Engine(url, layout) as second:
        assert second.prefetch(key) == []
        pages, stored = first.back_up(key, hashes(key))
        assert stored == PAGES * PAGE
        assert second.prefetch(key) == pages
        # A longer prompt: as far as it is known.
        assert second.prefetch(prompt((PAGES + 3) * PAGE)) == pages
        assert second.prefetch(prompt(PAGES * PAGE, seed=1)) == []
        counts = second.backend.counters()
        assert counts["loaded_pages"] == 2 * PAGES
        assert counts["failures"] == 0
        stats = first.backend.get_stats()
        assert stats.backup_pgs == [PAGES]
        assert stats.backup_bandwidth[0] > 0
        assert first.backend.get_stats().backup_pgs == []


def test_threads_that_copy_pages(tmp_path: Path) -> None:
    """Without `interface_v1`."""
    url = f"file://{tmp_path}/pool?size=64MiB"
    key = prompt(PAGES * PAGE)
    with Engine(url, settings={"interface_v1": 0}) as first, Engine(url) as in_place:
        pages, stored = first.back_up(key, hashes(key))
        assert stored == PAGES * PAGE
        assert first.prefetch(key) == pages
        assert in_place.prefetch(key) == []


def test_salts_and_adapters_are_in_the_names(tmp_path: Path) -> None:
    """SGLang's `cache_salt` and `extra_key`, in which it has the LoRA adapter."""
    url = f"file://{tmp_path}/pool?size=64MiB"
    plain = prompt(PAGES * PAGE)
    with Engine(url) as engine:
        pages, _ = engine.back_up(plain, hashes(plain))
        assert engine.prefetch(plain) == pages
        for of_another in ({"cache_salt": "tenant"}, {"extra_key": "adapter"}):
            assert engine.prefetch(prompt(PAGES * PAGE, **of_another)) == []


def test_pages_outlive_the_process(tmp_path: Path, model: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    key = prompt(PAGES * PAGE)
    with Engine(url) as engine:
        pages, _ = engine.back_up(key, hashes(key))
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.reader", url, str(model), str(PAGES * PAGE)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    found, loaded = json.loads(done.stdout.splitlines()[-1])
    assert found == [page.hex() for page in pages]
    assert loaded == [], "nothing of vLLM's connector is loaded for SGLang"


def test_threads_survive_a_killed_pool(tmp_path: Path, valkey_server: Server) -> None:
    key = prompt(PAGES * PAGE)
    with Engine(valkey_server.unix_url) as engine:
        pages, _ = engine.back_up(key, hashes(key))
        assert engine.prefetch(key) == pages
        valkey_server.kill()
        assert engine.prefetch(key) == []
        other = prompt(PAGES * PAGE, seed=1)
        assert engine.back_up(other, hashes(other))[1] == 0
        assert engine.threads_live()
        assert engine.backend.counters()["failures"] >= 2
        valkey_server.start()
        # For a second after a failure nobody asks it.
        eventually(lambda: engine.back_up(other, hashes(other), seed=2)[1], pause=0.1)
        assert len(engine.prefetch(other)) == PAGES
        assert engine.threads_live()
