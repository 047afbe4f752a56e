"""Which of vLLM's environment variables may change KV: all of them, but for a list."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping

from penstock.vllm.compat.options import ADDRESSES, MEMORY, ROUNDING, WATCHING

_LIMITS = "says how much a request may bring, or how long something may take"
_TEXT = "makes tokens of text, or text of tokens; a block is named by its tokens"
_PLACES = "says where files lie; what a model is made of is told as it is"
_BUILD = "is about how vLLM was built"
_PROCESSES = "decides which processes there are, and how they speak"
_COMPILING = "is about how the model is compiled"
_SECRETS = "lets somebody in, and is nobody else's business"

MAY_DIFFER_BY_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_*_KEY": _SECRETS,
    "VLLM_*_TOKEN": _SECRETS,
    "VLLM_*SECRET*": _SECRETS,
    "VLLM_*PASSWORD*": _SECRETS,
    "VLLM_*_IP": ADDRESSES,
    "VLLM_*_IPS": ADDRESSES,
    "VLLM_*PORT": ADDRESSES,
    "VLLM_*_HOST": ADDRESSES,
    "VLLM_USAGE_*": WATCHING,
    "VLLM_NO_USAGE_STATS": WATCHING,
    "VLLM_DO_NOT_TRACK": WATCHING,
    "VLLM_*_LOG": WATCHING,
    "VLLM_*LOGGING*": WATCHING,
    "VLLM_LOG_*": WATCHING,
    "VLLM_*_LOG_LEVEL": WATCHING,
    "VLLM_DISABLE_LOG_LOGO": WATCHING,
    "VLLM_*DEBUG*": WATCHING,
    "VLLM_TRACE_FUNCTION": WATCHING,
    "VLLM_*_FOR_PROFILING": WATCHING,
    "VLLM_RINGBUFFER_WARNING_INTERVAL": WATCHING,
    "VLLM_COMPUTE_NANS_IN_LOGITS": WATCHING,
    "VLLM_RAISE_ON_LOGIT_NANS": WATCHING,
    "VLLM_GPU_SYNC_CHECK": WATCHING,
    "VLLM_KV_EVENTS_*": WATCHING,
    "VLLM_SERVER_DEV_MODE": WATCHING,
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
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": _TEXT,
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
    "VLLM_CPU_KVCACHE_SPACE": MEMORY,
    "VLLM_KV_OFFLOAD_*": MEMORY,
    "VLLM_USE_SIMPLE_KV_OFFLOAD": MEMORY,
    "VLLM_MEMORY_PROFILER_*": MEMORY,
    "VLLM_WEIGHT_OFFLOADING_*": MEMORY,
    "VLLM_WSL2_ENABLE_PIN_MEMORY": MEMORY,
    "VLLM_DEEPEP_BUFFER_SIZE_MB": MEMORY,
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": MEMORY,
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": MEMORY,
    "VLLM_FASTSAFETENSORS_QUEUE_SIZE": MEMORY,
    "VLLM_GC_*": MEMORY,
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
    "VLLM_CPU_OMP_THREADS_BIND": ROUNDING,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": ROUNDING,
    "VLLM_CPU_ATTN_SPLIT_KV": ROUNDING,
    "VLLM_ENABLE_INDUCTOR_*": ROUNDING,
    "VLLM_ALLREDUCE_USE_*": ROUNDING,
    "VLLM_USE_NCCL_SYMM_MEM": ROUNDING,
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": ROUNDING,
    "VLLM_TRITON_FORCE_FIRST_CONFIG": ROUNDING,
    "VLLM_TRITON_USE_TD": ROUNDING,
    "VLLM_USE_V2_MODEL_RUNNER": ROUNDING,
    "VLLM_DEEPEP_*": ROUNDING,
    "VLLM_DBO_COMM_SMS": ROUNDING,
    "VLLM_*_STREAM": ROUNDING,
    "VLLM_*STREAM*_TOKEN_THRESHOLD": ROUNDING,
    "VLLM_LORA_DISABLE_PDL": ROUNDING,
    "VLLM_DCP_Q_REPLICATE": ROUNDING,
    "VLLM_USE_DIRECT_DCP_*": ROUNDING,
    "VLLM_REPLICATE_EMBED": ROUNDING,
    "VLLM_RANDOMIZE_DP_DUMMY_INPUTS": "is about steps that no request is in",
}
"""Environment variables of vLLM in which engines that share KV may differ, each with the reason. A
star stands for any text. What is not here counts once it is set: many a variable chooses numbers of
fewer bits, or has a simulation in place of the model."""


_ROUNDING_OF_OTHERS = (
    *("ATEN_", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_"),
    *("ONEDNN_", "TORCH_ALLOW_TF32_"),
)
"""What the variables of libraries begin with that decide how many threads compute, and how."""


def rounding_environment() -> dict[str, str]:
    """The environment variables that are set and may change how numbers are rounded, though not
    which ones are meant."""
    return {
        name: _sizes(value) if name == "VLLM_CPU_OMP_THREADS_BIND" else value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_ROUNDING_OF_OTHERS) or ROUNDING in _reasons(name))
        and not name.endswith(("AFFINITY", "_PLACES"))
    }


def _sizes(cores: str) -> str:
    """How many cores each rank is bound to, as in `0-3,8|4-7,9`: which ones does not matter."""
    if not re.fullmatch(r"[0-9,|-]+", cores):
        return cores
    return "|".join(str(sum(map(_size, part.split(",")))) for part in cores.split("|"))


def _size(cores: str) -> int:
    first, _, last = cores.partition("-")
    return int(last) - int(first) + 1 if first and last else 1


def environment() -> dict[str, str]:
    """The environment variables of vLLM that are set and may change KV."""
    from vllm import envs

    return {
        name: os.environ[name]
        for name in sorted(envs.environment_variables)
        if name.startswith("VLLM_") and name in os.environ and not _may_differ(name)
    }


def _may_differ(name: str) -> bool:
    return bool(_reasons(name))


def _reasons(name: str) -> set[str]:
    """Why engines may differ in a variable of vLLM. There are none if they may not."""
    known = MAY_DIFFER_BY_ENVIRONMENT.items()
    return {reason for pattern, reason in known if fnmatch.fnmatchcase(name, pattern)}
