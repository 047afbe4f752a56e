"""Which of vLLM's environment variables may change KV: all of them, but for a list."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping

_ADDRESSES = "says where others are reached"
_LOGS = "is about what people and other programs see of the engine"
_LIMITS = "says how much a request may bring, or how long something may take"
_TEXT = "makes tokens of text, or text of tokens; a block is named by its tokens"
_PLACES = "says where files lie; what a model is made of is told as it is"
_BUILD = "is about how vLLM was built"
_KERNELS = "changes rounding only: which kernel computes, where, with how much at a time"
_PROCESSES = "decides which processes there are, and how they speak"
_MEMORY = "decides how much memory there is, and where"
_COMPILING = "is about how the model is compiled"
_SECRETS = "lets somebody in, and is nobody else's business"

MAY_DIFFER_BY_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_*_KEY": _SECRETS,
    "VLLM_*_TOKEN": _SECRETS,
    "VLLM_*SECRET*": _SECRETS,
    "VLLM_*PASSWORD*": _SECRETS,
    "VLLM_*_IP": _ADDRESSES,
    "VLLM_*_IPS": _ADDRESSES,
    "VLLM_*PORT": _ADDRESSES,
    "VLLM_*_HOST": _ADDRESSES,
    "VLLM_USAGE_*": _LOGS,
    "VLLM_NO_USAGE_STATS": _LOGS,
    "VLLM_DO_NOT_TRACK": _LOGS,
    "VLLM_*_LOG": _LOGS,
    "VLLM_*LOGGING*": _LOGS,
    "VLLM_LOG_*": _LOGS,
    "VLLM_DISABLE_LOG_LOGO": _LOGS,
    "VLLM_*DEBUG*": _LOGS,
    "VLLM_TRACE_FUNCTION": _LOGS,
    "VLLM_*_FOR_PROFILING": _LOGS,
    "VLLM_RINGBUFFER_WARNING_INTERVAL": _LOGS,
    "VLLM_COMPUTE_NANS_IN_LOGITS": _LOGS,
    "VLLM_RAISE_ON_LOGIT_NANS": _LOGS,
    "VLLM_GPU_SYNC_CHECK": _LOGS,
    "VLLM_KV_EVENTS_*": _LOGS,
    "VLLM_SERVER_DEV_MODE": _LOGS,
    "VLLM_*TIMEOUT*": _LIMITS,
    "VLLM_HTTP_*": _LIMITS,
    "VLLM_MAX_AUDIO_*": _LIMITS,
    "VLLM_MAX_*BAD_WORDS*": _LIMITS,
    "VLLM_MAX_COMPLETION_PROMPTS": _LIMITS,
    "VLLM_MAX_EMBED_DECODE_BYTES": _LIMITS,
    "VLLM_MAX_IMAGE_PIXELS": _LIMITS,
    "VLLM_MAX_MEDIA_*": _LIMITS,
    "VLLM_MAX_N_SEQUENCES": _LIMITS,
    "VLLM_MAX_STOP_STRINGS": _LIMITS,
    "VLLM_MEDIA_FETCH_*": _LIMITS,
    "VLLM_MEDIA_LOADING_*": _LIMITS,
    "VLLM_MEDIA_URL_*": _LIMITS,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": _LIMITS,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _LIMITS,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _LIMITS,
    "VLLM_SKIP_MODEL_NAME_VALIDATION": _LIMITS,
    "VLLM_CHAT_TEMPLATE_*": _TEXT,
    "VLLM_ENABLE_COHERE_API": _TEXT,
    "VLLM_ENABLE_RESPONSES_API_STORE": _TEXT,
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": _TEXT,
    "VLLM_GPT_OSS_*": _TEXT,
    "VLLM_SYSTEM_START_DATE": _TEXT,
    "VLLM_TOOL_*": _TEXT,
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": _TEXT,
    "VLLM_USE_FASTOKENS": _TEXT,
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": _TEXT,
    "VLLM_V1_USE_OUTLINES_CACHE": _TEXT,
    "VLLM_XGRAMMAR_CACHE_MB": _TEXT,
    "VLLM_USE_FLASHINFER_SAMPLER": _TEXT,
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": _TEXT,
    "VLLM_ASSETS_CACHE*": _PLACES,
    "VLLM_MEDIA_CACHE*": _PLACES,
    "VLLM_*_CACHE_DIR": _PLACES,
    "VLLM_*_CACHE_PATH": _PLACES,
    "VLLM_*_ROOT": _PLACES,
    "VLLM_*_SO_PATH": _PLACES,
    "VLLM_LORA_RESOLVER_*": _PLACES,
    "VLLM_TUNED_CONFIG_FOLDER": _PLACES,
    "VLLM_USE_MODELSCOPE": _PLACES,
    "VLLM_MODEL_REDIRECT_PATH": _PLACES,
    "VLLM_RPC_BASE_PATH": _PLACES,
    "VLLM_RUST_FRONTEND_PATH": _PLACES,
    "VLLM_TEST_FORCE_LOAD_FORMAT": _PLACES,
    "VLLM_PLUGINS": "names additions to vLLM; what they add to a model is told as it is",
    "VLLM_BUILD_*": _BUILD,
    "VLLM_DOCKER_*": _BUILD,
    "VLLM_IMAGE_TAG": _BUILD,
    "VLLM_MAIN_CUDA_VERSION": _BUILD,
    "VLLM_SKIP_*_SUFFIX": _BUILD,
    "VLLM_TARGET_DEVICE": _BUILD,
    "VLLM_USE_PRECOMPILED*": _BUILD,
    "VLLM_HAS_FLASHINFER_CUBIN": _BUILD,
    "VLLM_NCCL_INCLUDE_PATH": _BUILD,
    "VLLM_*CUDA_COMPATIBILITY*": _BUILD,
    "VLLM_CPU_CI_ENV": _BUILD,
    "VLLM_DP_*": _PROCESSES,
    "VLLM_RAY_*": _PROCESSES,
    "VLLM_USE_RAY_*": _PROCESSES,
    "VLLM_ENABLE_V1_MULTIPROCESSING": _PROCESSES,
    "VLLM_WORKER_MULTIPROC_METHOD": _PROCESSES,
    "VLLM_ELASTIC_EP_*": _PROCESSES,
    "VLLM_P2P_*": _PROCESSES,
    "VLLM_MOONCAKE_*": _PROCESSES,
    "VLLM_MQ_*": _PROCESSES,
    "VLLM_MSGPACK_*": _PROCESSES,
    "VLLM_OBJECT_STORAGE_*": _PROCESSES,
    "VLLM_PROCESS_NAME_PREFIX": _PROCESSES,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _PROCESSES,
    "VLLM_USE_RUST_*": _PROCESSES,
    "VLLM_USE_SPINLOOP_EXT": _PROCESSES,
    "VLLM_DISABLE_PYNCCL": _PROCESSES,
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": _PROCESSES,
    "VLLM_GPU_NIC_PCIE_MAPPING": _PROCESSES,
    "VLLM_NIC_SELECTION_VARS": _PROCESSES,
    "VLLM_SKIP_P2P_CHECK": _PROCESSES,
    "VLLM_PP_LAYER_PARTITION": _PROCESSES,
    "VLLM_KV_CACHE_LAYOUT": "decides how KV lies here; it is the same in the pool",
    "VLLM_MLA_DISABLE": "decides which kind of KV a model has, which is told by another fact",
    "VLLM_CPU_KVCACHE_SPACE": _MEMORY,
    "VLLM_KV_OFFLOAD_*": _MEMORY,
    "VLLM_USE_SIMPLE_KV_OFFLOAD": _MEMORY,
    "VLLM_MEMORY_PROFILER_*": _MEMORY,
    "VLLM_WEIGHT_OFFLOADING_*": _MEMORY,
    "VLLM_WSL2_ENABLE_PIN_MEMORY": _MEMORY,
    "VLLM_DEEPEP_BUFFER_SIZE_MB": _MEMORY,
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": _MEMORY,
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": _MEMORY,
    "VLLM_FASTSAFETENSORS_QUEUE_SIZE": _MEMORY,
    "VLLM_GC_*": _MEMORY,
    "VLLM_*_CUDAGRAPH*": _COMPILING,
    "VLLM_COMPILE_*": _COMPILING,
    "VLLM_DISABLE_COMPILE_CACHE": _COMPILING,
    "VLLM_ENABLE_STARTUP_PLAN": _COMPILING,
    "VLLM_FORCE_AOT_LOAD": _COMPILING,
    "VLLM_USE_AOT_COMPILE": _COMPILING,
    "VLLM_USE_MEGA_AOT_ARTIFACT": _COMPILING,
    "VLLM_USE_BYTECODE_HOOK": _COMPILING,
    "VLLM_USE_STANDALONE_COMPILE": _COMPILING,
    "VLLM_USE_LAYERNAME": _COMPILING,
    "VLLM_*JIT_WARMUP*": _COMPILING,
    "VLLM_DEEP_GEMM_WARMUP": _COMPILING,
    "VLLM_CPU_OMP_THREADS_BIND": _KERNELS,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": _KERNELS,
    "VLLM_CPU_ATTN_SPLIT_KV": _KERNELS,
    "VLLM_ENABLE_INDUCTOR_*": _KERNELS,
    "VLLM_ALLREDUCE_USE_*": _KERNELS,
    "VLLM_USE_NCCL_SYMM_MEM": _KERNELS,
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": _KERNELS,
    "VLLM_TRITON_FORCE_FIRST_CONFIG": _KERNELS,
    "VLLM_TRITON_USE_TD": _KERNELS,
    "VLLM_USE_V2_MODEL_RUNNER": _KERNELS,
    "VLLM_DEEPEP_*": _KERNELS,
    "VLLM_DBO_COMM_SMS": _KERNELS,
    "VLLM_*_STREAM": _KERNELS,
    "VLLM_*STREAM*_TOKEN_THRESHOLD": _KERNELS,
    "VLLM_LORA_DISABLE_PDL": _KERNELS,
    "VLLM_DCP_Q_REPLICATE": _KERNELS,
    "VLLM_USE_DIRECT_DCP_*": _KERNELS,
    "VLLM_REPLICATE_EMBED": _KERNELS,
    "VLLM_RANDOMIZE_DP_DUMMY_INPUTS": "is about steps that no request is in",
}
"""Environment variables of vLLM in which engines that share KV may differ, each with the reason. A
star stands for any text. What is not here counts once it is set: many a variable chooses numbers of
fewer bits, or has a simulation in place of the model."""


def environment() -> dict[str, str]:
    """The environment variables of vLLM that are set and may change KV."""
    from vllm import envs

    return {
        name: os.environ[name]
        for name in sorted(envs.environment_variables)
        if name.startswith("VLLM_") and name in os.environ and not _may_differ(name)
    }


def _may_differ(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in MAY_DIFFER_BY_ENVIRONMENT)
