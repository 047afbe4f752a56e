"""What a prefill engine tells proxies that ask for its name."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest

from lab.processes import free_port
from lab.waiting import LIMIT
from penstock.errors import ConfigError
from penstock.vllm.bootstrap import Bootstrap
from penstock.vllm.settings import Settings


def get(port: int, path: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{path}", timeout=LIMIT) as answer:
        return bytes(answer.read())


def test_every_data_parallel_rank_has_the_engines_name() -> None:
    bootstrap = Bootstrap(f"127.0.0.1:{free_port()}", "the engine", 2)
    try:
        said = json.loads(get(bootstrap.port, "/query"))
        assert sorted(said) == ["0", "1"]
        assert {entry["engine_id"] for entry in said.values()} == {"the engine"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(bootstrap.port, "/other")
    finally:
        bootstrap.shutdown()
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(bootstrap.port, "/query")


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=address):
            Bootstrap(address, "the engine", 1)


@pytest.mark.parametrize("address", ["8998", ":8998", "host", "host:", "host:0", "host:99999"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"penstock\.bootstrap"):
        Settings.parse({"penstock.pool": "memory://?size=1MiB", "penstock.bootstrap": address})
