"""What an engine's processes import, and what each would do first: see `lab.engines.forks`."""

import contextlib
import gc
import importlib
import os

import torch
import vllm.config
import vllm.engine.arg_utils
import vllm.model_executor.models.deepseek_v2
import vllm.model_executor.models.gemma2
import vllm.model_executor.models.llama
import vllm.sampling_params
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.core.sched.async_scheduler
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

import penstock.vllm.connector
import penstock.vllm.layouts
import penstock.vllm.memory
import penstock.vllm.model_share
import penstock.vllm.plugin  # noqa: F401

# What processes import late, in versions of vLLM that have it.
for name in (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.lora.resolver",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.transformers_utils.chat_templates",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# Log probabilities are ranked by a function that torch compiles when it is first called, and again
# for the first other vocabulary, for one request, and for several.
with torch.inference_mode():
    for requests, vocabulary in ((1, 8), (1, 9), (2, 8), (3, 9)):
        chosen = torch.zeros(requests, dtype=torch.int64)
        Sampler.gather_logprobs(torch.zeros(requests, vocabulary), 1, chosen)

# Without Triton, each worker looks through all modules for kernels to replace. They are replaced
# now, in what is imported later too.
if replace := getattr(current_platform, "register_triton_kernel_overrides", None):
    replace()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)

# Each process would set the levels of some thousand loggers anew. What is logged goes to files.
with contextlib.suppress(ImportError):
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    os.environ["VLLM_LOGGING_COLOR"] = "0"
    configure_logging_if_needed(LoggingConfig())
    for module in (vllm.v1.engine.core, vllm.v1.executor.multiproc_executor):
        module.configure_logging = configure_logging_if_needed

# vLLM collects garbage five times in an engine's life. What was imported here is none: each process
# would look at all of it each time, and copy its pages. That took half of a start.
gc.collect()
gc.freeze()
