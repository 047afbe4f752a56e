"""What happens to engines and pools around the hits.

What is compared bit for bit is computed alone, as kernels round a batch of several requests in
another way. So others run before it, or beside it, but not in its own steps. A step is a block
here: a prompt's whole block has a step for itself as long as no other request is running.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from benches.exact.cell import Cell
from benches.exact.families import ROOT_BLOCKS
from benches.trained.conditions import settle
from lab.engines.node import Node

SMALL_POOL_ROOTS = 6
"""Roots that a small pool has room for, of `MANY_ROOTS`."""
MANY_ROOTS = 16


def restart(cell: Cell) -> None:
    """A process stores and is killed at once. Others, one after the other, load."""
    roots = -(-cell.goal // ROOT_BLOCKS)
    node = cell.engines.get()
    for number in range(roots):
        cell.store(node, number)
    cell.engines.kill()
    for half in (range(roots // 2), range(roots // 2, roots)):
        cell.engines.close()
        cell.seen["restarts"] += 1
        with cell.engine() as node:
            for number in half:
                for prompt in cell.parts(number):
                    cell.look(node, prompt)


def divergent(cell: Cell) -> None:
    """Every prompt goes along with an earlier one for some tokens, and then its own way."""
    block = cell.family.block
    with cell.engine() as node:
        cell.store(node, 0)
        settle(node)
        prompts = [cell.root(0)]
        for number in itertools.count():
            if not cell.wants_more:
                break
            along = cell.rng.choice(prompts[-MANY_ROOTS:] + prompts[:1])
            shared = cell.rng.randint(block // 2, len(along) - 1)
            longest = ROOT_BLOCKS * block + block // 2
            count = cell.rng.randint(1, longest - shared) if shared < longest else 1
            own = cell.family.tokens(count, f"divergent {number}")
            # The first token of its own is another one than the earlier prompt has there.
            own[0] = along[shared] ^ 1 if along[shared] > 3 else 5
            prompts.append(along[:shared] + own)
            cell.look(node, prompts[-1])
            cell.seen["diverging"] += 1


def preemption(cell: Cell) -> None:
    """A new prompt is being stored when others, of more importance, take the blocks it needs."""
    beside, first = 6, 1000
    with cell.engine(**cell.family.tight) as node:
        for number in range(first, first + beside):
            cell.store(node, number)
        settle(node)
        for number in itertools.count(first + beside):
            if not cell.wants_more:
                break
            node.forget()
            # It goes first, so its blocks are computed alone. Its answer soon needs one more.
            length = (ROOT_BLOCKS + 1) * cell.family.block - cell.rng.randint(3, 12)
            prompt = cell.root(number)
            prompt += cell.family.tokens(length - len(prompt), f"victim {number}")
            victim = node.start(prompt, max_tokens=40, priority=9)
            # Their blocks are in the pool, so they load. Soon they too need one more.
            earlier = cell.rng.sample(range(first, number), beside)
            others = []
            for each in earlier:
                length = cell.rng.randint(2, ROOT_BLOCKS) * cell.family.block
                prompt = cell.root(each)[: length - cell.rng.randint(2, 12)]
                others.append(node.start(prompt, max_tokens=24, priority=1))
            # It must not go on beside them, as then it is computed in a batch.
            node.answer(others[0])
            _abort(cell, node, victim)
            for other in others[1:]:
                node.answer(other)
            # At once: the blocks that it gets were given away a moment before.
            if absent := sorted(set(range(first, number)) - set(earlier)):
                cell.look(node, cell.part(cell.rng.choice(absent), ROOT_BLOCKS), forget=False)
            for prompt in cell.parts(number):
                cell.look(node, prompt)


def abort(cell: Cell) -> None:
    """Requests are aborted while they store, and while they load."""
    first = 2000
    with cell.engine(**cell.family.tight) as node:
        began = time.monotonic()
        cell.store(node, first)
        # A device stores a prompt in a moment, a CPU takes its time.
        storing_takes = 2 * (time.monotonic() - began)
        settle(node)
        for number in itertools.count(first + 1):
            if not cell.wants_more:
                break
            node.forget()
            storing = node.start(cell.root(number), cell.family.block)
            time.sleep(cell.rng.uniform(0.0, cell.rng.choice((0.3, storing_takes))))
            _abort(cell, node, storing)
            loading = node.start(cell.part(cell.rng.randrange(first, number), ROOT_BLOCKS), 8)
            time.sleep(cell.rng.uniform(0.0, cell.rng.choice((0.04, 0.005))))
            _abort(cell, node, loading)
            # At once: the aborted load may still be writing.
            cell.look(node, cell.part(cell.rng.randrange(first, number), ROOT_BLOCKS), forget=False)
            for prompt in cell.parts(number):
                cell.look(node, prompt)


def _abort(cell: Cell, node: Node, number: int) -> None:
    node.abort(number)
    cell.seen["aborted"] += node.answer(number).finish == "abort"


def corruption(cell: Cell) -> None:
    """Bits flip in values at rest."""
    with cell.engine() as node:
        for number in range(MANY_ROOTS):
            cell.store(node, number)
        settle(node)
        while cell.wants_more:
            cell.seen["damaged"] += cell.engines.pool.damage(cell.rng, 0.05)
            for number in cell.rng.sample(range(MANY_ROOTS), MANY_ROOTS // 2):
                cell.look(node, cell.part(number, cell.rng.randint(1, ROOT_BLOCKS)))


def eviction(cell: Cell) -> None:
    """The pool has room for a part of the prompts, and evicts all the time."""
    with cell.engine() as node:
        while cell.wants_more:
            number, blocks = cell.rng.randrange(MANY_ROOTS), cell.rng.randint(1, ROOT_BLOCKS)
            cell.look(node, cell.part(number, blocks))
            if cell.rng.random() < 0.3:
                node.forget()
                cell.store(node, cell.rng.randrange(MANY_ROOTS))
            cell.seen["evicted"] = cell.engines.pool.evicted()


FAULTS: dict[str, Callable[[Cell], None]] = {
    "restart": restart,
    "divergent": divergent,
    "corruption": corruption,
    "preemption": preemption,
    "abort": abort,
    "eviction": eviction,
}
"""In an order in which engines can go on."""
AT_REST = ("eviction", "corruption")
"""Faults of the pool, not of an engine."""
IN_SMALL_POOL = ("eviction",)

EVIDENCE = {
    "restart": "restarts",
    "eviction": "evicted",
    "divergent": "diverging",
    "preemption": "num_preemptions",
    "abort": "aborted",
    "corruption": "rejected_objects",
}
"""What has to be seen, or the fault did not happen."""
