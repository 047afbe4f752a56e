"""What an engine's processes import, and nothing that runs: see `tests.e2e.forks`."""

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
