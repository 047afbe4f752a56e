"""The program of an engine's process: requests come in and answers go out, one JSON object a line.

:class:`lab.engines.node.Node` is its other end.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import time
from typing import Any


async def _serve(args: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    if prepare := args.pop("prepare", None):
        _function(prepare)()
    if transfer := args.pop("kv_transfer_config", None):
        args["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    running: set[int] = set()

    def say(number: int, **content: Any) -> None:
        sys.stdout.write(json.dumps({"id": number} | content) + "\n")
        sys.stdout.flush()

    async def generate(number: int, request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **request["sampling"],
        )
        began = time.monotonic()
        final = None
        async for output in engine.generate(
            {"prompt_token_ids": request["prompt"]} | request["salt"] | _seen(request),
            params,
            str(number),
            lora_request=request["adapter"] and LoRARequest(**request["adapter"]),
            trace_headers=request["trace_headers"],
            priority=request["priority"],
        ):
            final = output
        assert final is not None
        completion = final.outputs[0]
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
            "cached": final.num_cached_tokens,
            "finish": completion.finish_reason,
            "seconds": time.monotonic() - began,
            "params": final.kv_transfer_params,
        }

    async def abort(number: int) -> None:
        known = engine.output_processor.external_req_ids
        while number in running and str(number) not in known:
            await asyncio.sleep(0.001)
        await engine.abort(str(number))

    async def handle(message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            match message["op"]:
                case "generate":
                    running.add(number)
                    try:
                        result: Any = await generate(number, message)
                    finally:
                        running.discard(number)
                case "abort":
                    await abort(message["request"])
                    result = None
                case "load_adapter":
                    result = await engine.add_lora(LoRARequest(**message["adapter"]))
                case "reset":
                    result = await engine.reset_prefix_cache(message["running"], message["pool"])
                case "forget_images":
                    await engine.reset_mm_cache()
                    result = await engine.reset_encoder_cache()
                case "call":
                    method, options = message["method"], message["options"]
                    result = await engine.collective_rpc(method, kwargs=options)
                case "set_weight_version":
                    result = await engine.update_weight_version(message["name"])
                case "pause":
                    result = await engine.pause_generation(
                        mode=message["mode"], clear_cache=message["clear"]
                    )
                case "resume":
                    result = await engine.resume_generation()
                case "way":
                    way = _function(message["way"])
                    result = await way(engine, message["prompt"], f"way-{number}")
                case "counters":
                    unfinished = engine.output_processor.get_num_unfinished_requests()
                    result = _counters() | {"unfinished_requests": unfinished}
                case "part":
                    result = await engine.engine_core.call_utility_async("part")
                case "renew":
                    from lab.engines import exchange

                    exchange.write_to(message["log"])
                    extra, log = message["extra"], message["log"]
                    result = await engine.engine_core.call_utility_async("renew", extra, log)
            say(number, result=result)
        except Exception as error:
            say(number, error=repr(error))

    say(0, ready=True, renewable=transfer is not None and hasattr(EngineCore, "renew"))
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(handle(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    engine.shutdown()


def _function(name: str) -> Any:
    """What ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _seen(request: dict[str, Any]) -> dict[str, Any]:
    """The part of a prompt that has its images."""
    if not request["images"]:
        return {}
    from lab.models.images import picture

    seen: dict[str, Any] = {
        "multi_modal_data": {"image": [picture(number) for number in request["images"]]}
    }
    if request["image_names"]:
        seen["multi_modal_uuids"] = {"image": request["image_names"]}
    return seen


def _counters() -> dict[str, float]:
    import prometheus_client

    found: dict[str, float] = {}
    for metric in prometheus_client.REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                found[name.removeprefix("penstock_")] = (
                    found.get(name.removeprefix("penstock_"), 0) + sample.value
                )
    return found


def main(args: dict[str, Any]) -> None:
    """Serves until standard input ends."""
    try:
        asyncio.run(_serve(args))
        # vLLM's engine ends once more when it is collected. At the interpreter's end, what it needs
        # for that is gone.
        gc.collect()
    except BaseException as error:
        print(json.dumps({"id": 0, "failed": repr(error)}), flush=True)
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
