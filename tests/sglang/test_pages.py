"""Pages of every layout come back bit by bit, from every kind of pool."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.servers import Server
from tests.sglang.engines import (
    LAYOUTS,
    PAGE,
    backend,
    fill,
    mha_host,
    mla_host,
    names,
    page_bytes,
    tensors,
)

PAGES = 5


def exchange(storing: Any, source: Any, loading: Any, target: Any, tokens: int = PAGE) -> None:
    """Stores pages from one host pool and loads them into other places of another."""
    keys = names(PAGES)
    assert storing.moves_in_place()
    fill(source, seed=1)
    stored = source.alloc(PAGES * tokens)
    wanted = [page_bytes(source, int(start)) for start in stored[::tokens]]
    assert storing.batch_exists(keys) == 0
    assert storing.batch_set_v1(keys, stored) == [True] * PAGES
    fill(target, seed=2)
    # Neither the same places nor the same order.
    places = target.alloc((PAGES + 1) * tokens).view(-1, tokens)[1:].flip(0).reshape(-1)
    before = [memory.clone() for memory in tensors(target)]
    assert loading.batch_exists([*keys, *names(1, "other")]) == PAGES
    assert loading.batch_get_v1(keys, places) == [True] * PAGES
    assert [page_bytes(target, int(start)) for start in places[::tokens]] == wanted
    # What lies beside the pages is as it was.
    for start, page in zip(places[::tokens].tolist(), wanted, strict=True):
        assert len(page) == len(page_bytes(target, start))
    changed = sum(int((old != new).sum()) for old, new in zip(before, tensors(target), strict=True))
    assert 0 < changed <= sum(map(len, wanted))


@pytest.fixture(params=["file", "shm", "valkey", "file and valkey", "encrypted"])
def pool(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty pool of each kind."""
    kind = request.param
    file = f"file://{tmp_path}/pool?size=64MiB"
    if kind == "shm":
        name = f"test-sglang-{uuid.uuid4().hex[:8]}"
        yield f"shm://{name}?size=64MiB"
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)
        return
    if "valkey" in kind:
        server: Server = request.getfixturevalue("valkey_server")
        yield server.unix_url if kind == "valkey" else f"{file} {server.unix_url}"
        return
    if kind == "encrypted":
        monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEYS", "one:" + "A" * 43 + "=")
    yield file


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_every_layout(layout: str, pool: str) -> None:
    source, target = mha_host(layout), mha_host(layout)
    exchange(backend(pool, source), source, backend(pool, target), target)


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
def test_pages_of_latent_attention(layout: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    source, target = mla_host(layout), mla_host(layout)
    storing, loading = (backend(url, host, is_mla_model=True) for host in (source, target))
    exchange(storing, source, loading, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_pages_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    source, target = mha_host(dtype=dtype), mha_host(dtype=dtype)
    storing, loading = (backend(url, host, {"kv_dtype": str(dtype)}) for host in (source, target))
    exchange(storing, source, loading, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_that_sglang_copies(layout: str, tmp_path: Path) -> None:
    """Without `interface_v1`, SGLang gives and takes copies of pages. They are other objects."""
    url = f"file://{tmp_path}/pool?size=64MiB"
    host = mha_host(layout)
    fill(host)
    made = backend(url, host, {"interface_v1": 0})
    assert not made.moves_in_place()
    keys = names(PAGES)
    pages = [host.get_data_page(n * PAGE) for n in range(PAGES)]
    assert made.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys]) == [None] * PAGES
    assert made.batch_set(keys, pages)
    assert made.exists(keys[0])
    assert made.batch_exists(keys) == PAGES
    got = made.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
    for page, loaded in zip(pages, got, strict=True):
        assert torch.equal(page.view(torch.uint8), loaded.view(torch.uint8))
    scattered = torch.zeros(2 * pages[0].numel(), dtype=pages[0].dtype)[::2]
    assert made.get(keys[0], scattered) is None, "it would have been loaded beside it"
    in_place = backend(url, host)
    assert in_place.batch_exists(keys) == 0, "pages in place are other objects"
    assert in_place.get(keys[0]) is None
    assert not in_place.set(keys[0], pages[0])
