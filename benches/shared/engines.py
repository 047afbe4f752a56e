"""vLLM engines as benches start them: their models and options, and a request to one at rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benches.shared import quiet
from benches.shared.connectors import ENGINE_ENVIRONMENT, Connector
from lab.engines.node import Answer, Node
from lab.models import attention

BLOCK = 128
"""vLLM's default block size on CPU."""
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4},
    "mid": {"hidden": 1024, "layers": 16, "heads": 16, "kv_heads": 8},
}
KV_BYTES = 288 << 20
"""KV cache of an engine: one request of 3900 tokens fits, in the larger model and data type."""


def save_model(folder: Path, model: str = "tiny", dtype: str = "float32") -> Path:
    """A Llama with random weights, in a folder below this one."""
    return attention.llama(folder / model, dtype=dtype, **MODELS[model])


def token_bytes(model: str, dtype: str) -> int:
    """The KV of a token: keys and values of each layer. All heads together make up `hidden`."""
    shape = MODELS[model]
    head_size = shape["hidden"] // shape["heads"]
    return 2 * shape["layers"] * shape["kv_heads"] * head_size * (4 if dtype == "float32" else 2)


def connected(model: Path, log: Path, connector: Connector, dtype: str) -> Node:
    """An engine with a connector that has its default settings."""
    options: dict[str, Any] = {}
    if (transfer := connector.transfer()) is not None:
        options["kv_transfer_config"] = transfer
    return Node(
        model,
        log,
        env=ENGINE_ENVIRONMENT | connector.environment(),
        dtype=dtype,
        block_size=BLOCK,
        kv_cache_memory_bytes=KV_BYTES,
        **options,
    )


def first_token(node: Node, prompt: list[int], rest: float = 0.2) -> Answer:
    """The first token after a prompt, asked for when the machine has come to rest."""
    quiet.wait(timeout=3, at_least=rest)
    return node.ask(prompt, max_tokens=1)
