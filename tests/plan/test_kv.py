"""What blocks and requests take, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan import config
from penstock.plan.kv import KvSizes, Serving, blocks_for, tokens_in

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA2 = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 4096,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def sizes(text: dict[str, object], **serving: int) -> KvSizes:
    return KvSizes(config.estimate(text), Serving(**serving))


def test_gqa() -> None:
    """8 heads of 128, key and value, 2 bytes: 4 KiB a token and layer."""
    found = sizes(LLAMA)
    assert found.token_bytes(0, 48) == 48 * 4096
    assert found.block_bytes(0, 48) == 48 * 4096 * 16
    assert found.block_bytes(48, 64) == 16 * 4096 * 16
    assert found.request_blocks() == 2048
    assert found.tokens(2048) == 32768
    assert found.concurrency(3072) == 1.5


def test_tensor_parallel_ranks_hold_a_head_at_least() -> None:
    assert sizes(LLAMA, tp=4).token_bytes(0, 1) == 1024
    assert sizes(LLAMA, tp=16).token_bytes(0, 1) == 512
    with pytest.raises(ConfigError, match="8 KV heads cannot be spread over 3 ranks"):
        sizes(LLAMA, tp=3)


def test_quantized_kv_halves() -> None:
    assert sizes(LLAMA, element_bytes=1).token_bytes(0, 64) == 64 * 2048


def test_mla_keeps_a_latent_on_every_rank() -> None:
    """512 + 64 elements of 2 bytes a token and layer, whatever the tensor parallelism."""
    for tp in (1, 8):
        found = sizes(DEEPSEEK, tp=tp, block_size=64)
        assert found.token_bytes(0, 61) == 61 * 1152
        assert found.block_bytes(0, 30) == 30 * 1152 * 64


def test_a_hybrid_has_two_groups_of_thirteen() -> None:
    """Gemma-2: 13 layers look back 4,096 tokens, 13 over everything. A block is as large as the
    larger group's part of the stage."""
    found = sizes(GEMMA2)
    page = 4 * 2 * 256 * 2 * 16
    assert found.groups == 2
    assert found.block_bytes(0, 26) == 13 * page
    # Layers 0 to 4: sliding 0, 2, 4 and full 1, 3.
    assert found.block_bytes(0, 5) == 3 * page
    # Full: 512 blocks; sliding: the window and a batch are longer than a request: 512 and one.
    assert found.request_blocks() == 512 + 513
    short = sizes(GEMMA2, batched_tokens=512)
    # Two batches are under way at once.
    assert short.request_blocks() == 512 + -(-(4095 + 2 * 512) // 16) + 1
    alone = sizes(GEMMA2, batched_tokens=512, concurrent_batches=1)
    assert alone.request_blocks() == 512 + -(-(4095 + 512) // 16) + 1


def test_five_to_one_hybrids_have_groups_of_the_smaller_kind() -> None:
    """Gemma-3: 5 sliding layers to a full one: groups of 4, one full and five sliding."""
    text = GEMMA2 | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 24,
        "sliding_window_pattern": 6,
    }
    found = sizes(text)
    page = 4 * 2 * 256 * 2 * 16
    assert found.groups == 6
    assert found.block_bytes(0, 24) == 4 * page
    assert found.block_bytes(0, 6) == page


def test_layers_that_read_others_kv_keep_none() -> None:
    found = sizes(LLAMA | {"num_kv_shared_layers": 16})
    assert found.block_bytes(48, 64) == 0
    assert found.block_bytes(0, 64) == found.block_bytes(0, 48)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 1 << 20))
def test_blocks_for_tokens_are_the_fewest(length: int, per_request: int, tokens: int) -> None:
    try:
        blocks = blocks_for(tokens, per_request, length)
    except ConfigError:
        assert tokens_in(per_request, per_request, length) >= tokens
        return
    assert tokens_in(blocks, per_request, length) >= tokens
    assert blocks == per_request + 1 or tokens_in(blocks - 1, per_request, length) < tokens


def test_blocks_of_whole_tokens_land_on_the_number() -> None:
    found = sizes(LLAMA, max_length=4096)
    assert found.blocks(100_000 // 16 * 16) * 16 == 100_000 // 16 * 16
    with pytest.raises(ConfigError, match=r"4,096 tokens .* ask for 4,112 at least"):
        found.blocks(4096)
