"""Fixtures of the tests with SGLang: its configuration as a server publishes it, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed
from sglang.srt.runtime_context import get_parallel

from penstock.demo.processes import free_port
from tests.sglang.engines import serving, write_model


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """One process is all ranks, as for a model on one device."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    get_parallel().override_permanently(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _served(model: Path) -> Iterator[None]:
    """A server serves the checkpoint."""
    with serving(model):
        yield
