"""Two vLLM engines over one pool: the second engine loads what the first one computed.

python examples/two_engines.py [MODEL]

MODEL is a name or a folder. Without it the example makes a small Llama with random weights.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # INFO tells what vLLM and Penstock do
from vllm import LLM, RequestOutput, SamplingParams

PROMPT = "The penstock carries water from the reservoir to the turbine. " * 20

# For one short prompt: load it in any case, and wait for the pool. Leave these out in a server.
PATIENT: dict[str, object] = {"penstock.load_policy": "always", "penstock.lookup_timeout": 60}
PATIENT |= {"penstock.load_timeout": 60, "penstock.drain_timeout": 60}


def answer(model: str, pool: str) -> RequestOutput:
    """What a new engine answers to the prompt."""
    connector = {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"penstock.pool": pool, **PATIENT},
    }
    sizes = {"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}
    engine = LLM(model, enforce_eager=True, kv_transfer_config=connector, **sizes)
    [output] = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    engine.llm_engine.engine_core.shutdown(timeout=120)  # stores go on after the answer
    return output


def small_model(folder: Path) -> Path:
    """A small Llama with random weights, which this repository's `lab` makes."""
    sys.path.append(str(Path(__file__).parents[1]))
    from lab.models.chat import model_folder

    return model_folder(folder)


if __name__ == "__main__":  # vLLM's processes import this file, too
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else str(small_model(Path(folder)))
        outputs = [answer(model, f"file://{folder}/pool?size=2GiB") for _ in range(2)]
    for name, output in zip(("first", "second"), outputs, strict=True):
        tokens = len(output.prompt_token_ids)
        print(f"{name} engine: {output.num_cached_tokens} of {tokens} prompt tokens loaded")
    print("same answer:", outputs[0].outputs[0].text == outputs[1].outputs[0].text)
