"""The example with SGLang, run as a reader runs it, prints what its page says."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs

from penstock.sglang.settings import Settings
from tests.examples.said import EXAMPLES, said
from tests.servers import Server
from tests.sglang.engines import PAGE, prompt
from tests.sglang.test_threads import hashes

SAID = said()["sglang_hicache.py"]
POOL = "valkey://cache.example:6379"
"""The pool of the command that the example prints for real servers."""


def printed(*arguments: str) -> str:
    """What the example prints. It is skipped where SGLang cannot name pages."""
    hashes(prompt(PAGE))
    command = [sys.executable, EXAMPLES / "sglang_hicache.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_prints_what_its_page_says() -> None:
    # SGLang may say something there, too.
    assert printed().endswith(SAID)


def test_the_pool_may_be_a_server(valkey_server: Server) -> None:
    url = valkey_server.unix_url
    for _ in range(2):
        # The second time the pool has all pages.
        assert printed(url).endswith(SAID.replace(POOL, url))


def test_sglang_takes_its_command() -> None:
    [line] = [each for each in SAID.replace("\\\n", "").splitlines() if "launch_server" in each]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(shlex.split(line)[3:])
    assert args.enable_hierarchical_cache
    assert (args.page_size, args.hicache_mem_layout) == (64, "page_first")
    assert args.hicache_storage_backend == "dynamic"
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(
        args.hicache_storage_backend_extra_config
    )
    assert (extra["class_name"], extra["interface_v1"]) == ("PenstockStorage", 1)
    assert Settings.parse(extra).pool == POOL
