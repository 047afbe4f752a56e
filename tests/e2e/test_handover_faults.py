"""Faults at random moments between a prefill and a decode engine: same tokens, and nothing hangs.

`PENSTOCK_TEST_FAULTS` says how many requests meet a fault, `PENSTOCK_TEST_SEED` which faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import STORE_LIMITS, Answer, Node
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.test_handover import TO_PREFILL
from tests.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

REQUESTS = int(os.environ.get("PENSTOCK_TEST_FAULTS", "24"))
SEED = int(os.environ.get("PENSTOCK_TEST_SEED", "7"))

PROMPTS = 16
AT_ONCE = 3
HANG_SECONDS = 60.0
"""Longer than all bounds of an engine together, on a machine that others use."""

SETTINGS = {
    "penstock.handover_timeout": 1.0,
    "penstock.lookup_timeout": 0.5,
    "penstock.load_timeout": 1.0,
    **dict.fromkeys(STORE_LIMITS),
}


class Pair:
    """A prefill engine that dies now and then, and a decode engine, behind a proxy."""

    def __init__(self, start: Callable[..., Node], model: Path, pool: str, server: Server | None):
        self._start, self._model = start, model
        self._options = {"pool": pool, "settings": SETTINGS}
        self._server = server
        self._lock = threading.Lock()
        self.prefill = self._new_prefill()
        self.decode = start(model, role="kv_consumer", **self._options)
        self.seen: Counter[str] = Counter()

    def _new_prefill(self) -> Node:
        return self._start(self._model, role="kv_producer", **self._options)

    def ask(self, number: int, prompt: list[int]) -> Answer | None:
        """An answer, as a proxy gets it; None if the fault ended the request itself."""
        chance = random.Random(f"{SEED} {number}")
        family = chance.choice(["serial", "blind", "concurrent"])
        faults = ["none", "abort prefill", "abort decode", "freeze", "die"]
        [fault] = chance.choices(faults, [2, 3, 3, 2 if self._server else 0, 0.3])
        delay = chance.expovariate(8.0)
        self.seen[f"{family}: {fault}"] += 1
        announced: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": str(number)}
        decode = None
        if family == "concurrent":
            decode = self.decode.start(prompt, params=announced)
        params = {"serial": dict(TO_PREFILL), "concurrent": {"do_remote_decode": True}}.get(family)
        prefill, said, disturb = self.prefill, None, None
        try:
            asked = prefill.start(prompt, max_tokens=1, params=params)
            if fault not in ("none", "abort decode"):
                disturb = threading.Timer(delay, self._disturb, (fault, prefill, asked, chance))
                disturb.start()
            said = prefill.answer(asked, timeout=HANG_SECONDS).params
        except (BrokenPipeError, RuntimeError):
            # It is dead. A proxy would ask another prefill engine, or none.
            self.seen["no prefill engine"] += 1
        if decode is None:
            decode = self.decode.start(prompt, params=said if family == "serial" else None)
        if fault == "abort decode":
            time.sleep(delay)
            self.decode.abort(decode)
        answer = self.decode.answer(decode, timeout=HANG_SECONDS)
        if disturb is not None:
            disturb.join()
        return None if answer.finish == "abort" else answer

    def _disturb(self, fault: str, prefill: Node, asked: int, chance: random.Random) -> None:
        if fault == "abort prefill":
            with contextlib.suppress(BrokenPipeError, RuntimeError):
                prefill.abort(asked)
        elif fault == "freeze" and self._server is not None:
            with self._lock:
                self._server.freeze()
                time.sleep(chance.uniform(0.0, 2.0))
                self._server.thaw()
        elif fault == "die":
            with self._lock:
                if prefill is self.prefill:
                    prefill.kill()
                    self.prefill = self._new_prefill()


def run(pair: Pair, plain: Node) -> None:
    """Sends requests, some at once, and compares the answers."""
    prompts = [tokens(2 * BLOCK + 61 * n, seed=80_000 + n) for n in range(PROMPTS)]
    expected = [plain.ask(prompt).tokens for prompt in prompts]

    def one(number: int) -> bool:
        # Each prompt comes again and again, and the engines' own caches would have it.
        which = random.Random(f"{SEED} prompt {number}").randrange(PROMPTS)
        if number % PROMPTS == 0:
            pair.decode.send("reset")
        answer = pair.ask(number, prompts[which])
        assert answer is None or answer.tokens == expected[which], number
        return answer is not None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answered = sum(pool.map(one, range(REQUESTS)))
    assert answered > REQUESTS / 4
    # After all of it, the engines hand over as before.
    prompt = tokens(6 * BLOCK, seed=99_999)
    pair.prefill.ask(prompt, max_tokens=1)
    assert pair.decode.ask(prompt).tokens == plain.ask(prompt).tokens
    print(dict(pair.seen), {k: v for k, v in pair.decode.counters().items() if "hand" in k})


def test_faults_over_a_server(
    llama: Path, plain: Node, start: Callable[..., Node], valkey_server: Server
) -> None:
    pair = Pair(start, llama, valkey_server.unix_url, valkey_server)
    run(pair, plain)
    pair.prefill.stop()
    pair.decode.stop()


def test_faults_over_a_pool_that_is_full(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size={20 * KV_BYTES_PER_BLOCK}"
    pair = Pair(start, llama, pool, None)
    run(pair, plain)
    pair.prefill.stop()
    pair.decode.stop()
