"""Object stores, as far as no server is needed. `crates/penstock-store/tests/object.rs` has one."""

from __future__ import annotations

import os

import pytest

import penstock
from penstock.demo.processes import free_port
from penstock.errors import Unavailable


def test_a_fork_is_told_to_open_it_anew() -> None:
    pool = penstock.open(f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}&unsigned=true")
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(Unavailable, match="open it anew"):
                pool.get("key", timeout=20)
            pool.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
