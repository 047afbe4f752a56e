"""What is done in a process with vLLM: a model's folder is made, and an engine is asked."""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.sweep.configs import NotMade, tiny

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Of a process with an engine."""
BLOCK = 128
PROMPT = 20 * BLOCK + 5
WEIGHTS = 0.05
"""Random weights lie between this and its negative. vLLM's own dummy weights are so small that all
prompts have the same answer."""

WAYS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    # Left alone, vLLM takes AMX where the CPU has it, and that one refuses float32.
    {"dtype": "float32", "attention_backend": "CPU_MLA"},
    {"dtype": "bfloat16", "attention_backend": "CPU_MLA"},
)
"""Options with which a model may start."""

Answer = tuple[list[int], list[float], int]
"""Tokens, the logarithms of their probabilities, and how many of the prompt's tokens were
cached."""


def make(architecture: str, model: Path) -> str:
    """Makes a model's folder. Returns why that is not possible; else nothing."""
    try:
        config = tiny(architecture)
    except NotMade as error:
        return str(error)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    return ""


def check_class(architecture: str) -> str:
    """Returns why vLLM cannot import the architecture; else nothing. vLLM itself asks a process of
    its own, and does not say what is wrong."""
    from vllm.model_executor.models import ModelRegistry

    try:
        ModelRegistry.models[architecture].load_model_cls()
    except Exception as error:
        return _said(error)
    return ""


def answers(model: Path, way: int, pool: str | None) -> list[Answer] | str:
    """What an engine says to one prompt, to the same again, and to another; or why there is
    none."""
    _wide_weights()
    prompt, other = (_prompt(seed) for seed in (1, 2))
    try:
        with _engine(model, dict(WAYS[way]), pool) as llm:
            return [_ask(llm, each) for each in (prompt, prompt, other)]
    except BaseException as error:
        return _said(error)


def _prompt(seed: int) -> list[int]:
    """A prompt. All end with the same tokens: only KV can tell them apart."""
    draws = random.Random(seed)
    return [draws.randrange(8, 400) for _ in range(20 * BLOCK)] + [9, 10, 11, 12, 13]


@contextlib.contextmanager
def _engine(model: Path, options: dict[str, Any], pool: str | None) -> Iterator[Any]:
    """An engine in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if pool is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="PenstockConnector",
            kv_connector_module_path="penstock.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "penstock.pool": pool,
                "penstock.load_policy": "always",
                "penstock.host_bytes": "64MiB",
                "penstock.host_tier": False,
                "penstock.lookup_timeout": 60.0,
                "penstock.load_timeout": 60.0,
                "penstock.drain_timeout": 60.0,
            },
        )
    llm = LLM(
        model=str(model),
        load_format="dummy",
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT + 100,
        max_num_seqs=2,
        block_size=BLOCK,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 30,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        **options,
    )
    try:
        yield llm
    finally:
        # Waits until what was stored is in the pool.
        llm.llm_engine.engine_core.shutdown()


def _ask(llm: Any, prompt: list[int]) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1
    )
    answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    # The last stores are ordered with the next step.
    llm.generate([{"prompt_token_ids": [7, 8]}], sampling, use_tqdm=False)
    told = answer.outputs[0]
    steps = zip(told.token_ids, told.logprobs, strict=True)
    logprobs = [step[token].logprob for token, step in steps]
    return list(told.token_ids), logprobs, answer.num_cached_tokens


def _wide_weights() -> None:
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    function: Any = inspect.unwrap(initialize_single_dummy_weight)
    low, high, *rest = function.__defaults__
    assert -low == high
    function.__defaults__ = (-WEIGHTS, WEIGHTS, *rest)


def _said(error: BaseException) -> str:
    """The error that began it, in a line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split())
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"{Path(frames[-1].filename).name}: {frames[-1].line}"
    return textwrap.shorten(f"{type(error).__name__}: {text}", 240, placeholder=" …")
