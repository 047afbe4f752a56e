"""Ways to ask an engine, beside one prompt and its answer. Called in the engine's process
(:meth:`lab.engines.node.Node.way`); each returns the tokens of all answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.e2e.conftest import BLOCK

Answers = list[list[int]]


def _sampling(**options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    usual: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**usual | options)


async def _last(outputs: AsyncIterator[Any]) -> Any:
    last = None
    async for output in outputs:
        last = output
    assert last is not None
    return last


def _tokens(prompt: list[int]) -> Any:
    return {"prompt_token_ids": prompt}


async def four(engine: Any, prompt: list[int], name: str) -> Answers:
    """Four answers to one prompt."""
    sampling = _sampling(n=4, temperature=1.0, seed=7)
    last = await _last(engine.generate(_tokens(prompt), sampling, name))
    return [list(output.token_ids) for output in last.outputs]


async def beams(engine: Any, prompt: list[int], name: str) -> Answers:
    """A beam search, as vLLM's own: each step asks for one token after each beam."""
    found: list[tuple[float, list[int]]] = [(0.0, [])]
    for step in range(4):
        sampling = _sampling(max_tokens=1, logprobs=4)
        asked = [
            _last(engine.generate(_tokens(prompt + beam), sampling, f"{name}-{step}-{place}"))
            for place, (_, beam) in enumerate(found)
        ]
        answers = await asyncio.gather(*asked)
        longer = [
            (score + each.logprob, [*beam, token])
            for (score, beam), answer in zip(found, answers, strict=True)
            for token, each in answer.outputs[0].logprobs[0].items()
        ]
        found = sorted(longer, key=lambda each: (-each[0], each[1]))[:2]
    return [beam for _, beam in found]


async def embeddings(engine: Any, prompt: list[int], name: str) -> Answers:
    """A prompt that is given as embeddings, one for each token."""
    import torch

    generator = torch.Generator().manual_seed(prompt[0])
    size = engine.vllm_config.model_config.get_hidden_size()
    given = torch.randn(len(prompt), size, generator=generator)
    last = await _last(engine.generate({"prompt_embeds": given}, _sampling(), name))
    return [list(last.outputs[0].token_ids)]


async def session(engine: Any, prompt: list[int], name: str) -> Answers:
    """A session with three inputs. vLLM drops the last token of an answer when the next input
    comes; the first time, this token ends a block."""
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    sampling = _sampling(output_kind=RequestOutputKind.DELTA)
    ends = [3 * BLOCK - sampling.max_tokens, 4 * BLOCK, len(prompt)]
    answers: Answers = [[]]
    is_answered = asyncio.Event()

    async def inputs() -> AsyncIterator[Any]:
        for start, end in zip([0, *ends], ends, strict=False):
            yield StreamingInput(prompt=_tokens(prompt[start:end]))
            await is_answered.wait()
            is_answered.clear()

    async for output in engine.generate(inputs(), sampling, name):
        if output.outputs:
            answers[-1] += output.outputs[0].token_ids
        if len(answers[-1]) == sampling.max_tokens and len(answers) <= len(ends):
            answers.append([])
            is_answered.set()
    return answers[:-1]


async def _paused(engine: Any, prompt: list[int], name: str, mode: str) -> Answers:
    """A request that runs, and two that wait, while generation is paused and vLLM's caches are
    emptied. Then another one."""
    from vllm.sampling_params import RequestOutputKind

    runs = asyncio.Event()
    sampling = _sampling(max_tokens=64, output_kind=RequestOutputKind.CUMULATIVE)

    async def ask(place: int) -> list[int]:
        found: list[int] = []
        own = [*prompt[: -1 - place], place]
        async for output in engine.generate(_tokens(own), sampling, f"{name}-{place}"):
            found = list(output.outputs[0].token_ids)
            runs.set()
        return found

    asked = [asyncio.create_task(ask(place)) for place in range(3)]
    await runs.wait()
    await engine.pause_generation(mode=mode)
    await engine.resume_generation()
    answers = await asyncio.gather(*asked)
    after = await _last(engine.generate(_tokens(prompt), _sampling(), f"{name}-after"))
    # How far aborted requests came depends on the machine.
    whole = [] if mode == "abort" else answers
    return [*whole, list(after.outputs[0].token_ids)]


async def kept(engine: Any, prompt: list[int], name: str) -> Answers:
    """Requests that are frozen in a pause."""
    return await _paused(engine, prompt, name, "keep")


async def waited_for(engine: Any, prompt: list[int], name: str) -> Answers:
    """Requests that a pause waits for."""
    return await _paused(engine, prompt, name, "wait")


async def aborted(engine: Any, prompt: list[int], name: str) -> Answers:
    """Requests that a pause aborts."""
    return await _paused(engine, prompt, name, "abort")


async def embedding(engine: Any, prompt: list[int], name: str) -> list[list[float]]:
    """The prompt's embedding, of a model that makes such."""
    from vllm import PoolingParams

    last = await _last(engine.encode(_tokens(prompt), PoolingParams(task="embed"), name))
    return [last.outputs.data.tolist()]
