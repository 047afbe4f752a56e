"""What an engine's processes import, and what each would do first: see `tests.e2e.forks`."""

import gc

import torch
import vllm.config
import vllm.engine.arg_utils
import vllm.model_executor.models.deepseek_v2
import vllm.model_executor.models.gemma2
import vllm.model_executor.models.llama
import vllm.sampling_params
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.v1.sample.sampler import Sampler

# Log probabilities are ranked by a function that torch compiles when it is first called.
with torch.inference_mode():
    Sampler.gather_logprobs(torch.zeros(2, 8), 1, torch.zeros(2, dtype=torch.int64))

# vLLM collects garbage five times in an engine's life. What was imported here is none: each process
# would look at all of it each time, and copy its pages. That took half of a start.
gc.collect()
gc.freeze()
