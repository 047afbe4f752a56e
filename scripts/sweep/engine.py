"""One architecture, in this process: alone, and over a pool."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
"""Of a process with engines."""
BLOCK = 128
PROMPT = 20 * BLOCK + 5
WEIGHTS = 0.05
"""Random weights lie between this and its negative. vLLM's own dummy weights are so small that all
prompts have the same answer."""

RIGHT, NO_HITS, WRONG, FAILS = "right", "no hits", "wrong", "fails"
REFUSED, NOT_ALONE, NOT_MADE = "refused", "not alone", "not made"
UNTOLD = "same for all prompts"


@dataclass(frozen=True)
class Found:
    """What became of an architecture."""

    architecture: str
    outcome: str
    why: str = ""
    cached: int = 0
    """Tokens of the hit."""


Answer = tuple[tuple[int, ...], tuple[float, ...]]


def run(architecture: str, folder: Path, result: Path) -> None:
    """Runs it in a process of its own, and writes what was found to a file."""
    with (folder / "log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)

    def note(found: Found) -> None:
        result.write_text(json.dumps(asdict(found)))

    note(_try(architecture, folder, note))
    # Whatever an architecture left behind ends with the process.
    os._exit(0)


def _try(architecture: str, folder: Path, note: Callable[[Found], None]) -> Found:
    """Runs it, alone and over a pool in `folder`. Notes what it counts as if the process dies."""
    from vllm.model_executor.models import ModelRegistry

    note(Found(architecture, NOT_ALONE, "the process died, or did not end"))
    try:
        config = tiny(architecture)
    except NotMade as error:
        return Found(architecture, NOT_MADE, str(error))
    try:
        # vLLM asks a process of its own for this, and does not say what is wrong.
        ModelRegistry.models[architecture].load_model_cls()
    except Exception as error:
        return Found(architecture, NOT_ALONE, _said(error))
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    _wide_weights()
    prompt, other = (_prompt(seed) for seed in (1, 2))
    errors = []
    for dtype in ("float32", "bfloat16"):
        try:
            with engine(model, dtype) as llm:
                _ask(llm, prompt)
                hit, cached = _ask(llm, prompt)
                different, _ = _ask(llm, other)
            break
        except BaseException as error:
            errors.append(_said(error))
    else:
        return Found(architecture, NOT_ALONE, errors[-1])
    if not cached:
        return Found(architecture, NO_HITS, "vLLM's own cache has no hit")
    if hit == different:
        return Found(architecture, UNTOLD)
    note(Found(architecture, FAILS, "the process died, or did not end"))
    pool = f"file://{folder}/pool?size=1GiB"
    try:
        with engine(model, dtype, pool) as llm:
            _ask(llm, prompt)
        with engine(model, dtype, pool) as llm:
            found, loaded = _ask(llm, prompt)
    except BaseException as error:
        said = _said(error)
        return Found(architecture, REFUSED if "ConfigError" in said else FAILS, said)
    if loaded != cached:
        return Found(architecture, WRONG, f"{loaded} tokens cached, and {cached} without Penstock")
    return Found(architecture, RIGHT if found == hit else WRONG, "", cached)


def _prompt(seed: int) -> list[int]:
    """A prompt. All end with the same tokens: only KV can tell them apart."""
    draws = random.Random(seed)
    return [draws.randrange(8, 400) for _ in range(20 * BLOCK)] + [9, 10, 11, 12, 13]


@contextlib.contextmanager
def engine(model: Path, dtype: str, pool: str | None = None) -> Iterator[Any]:
    """An engine in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    options: dict[str, Any] = {}
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
        dtype=dtype,
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT + 100,
        max_num_seqs=2,
        block_size=BLOCK,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=256 << 20,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _ask(llm: Any, prompt: list[int]) -> tuple[Answer, int]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1
    )
    answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    # The last stores are ordered with the next step.
    llm.generate([{"prompt_token_ids": [7, 8]}], sampling, use_tqdm=False)
    told = answer.outputs[0]
    tokens = tuple(told.token_ids)
    logprobs = tuple(step[token].logprob for token, step in zip(tokens, told.logprobs, strict=True))
    return (tokens, logprobs), answer.num_cached_tokens


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
    return f"{type(error).__name__}: {text}"[:240]
