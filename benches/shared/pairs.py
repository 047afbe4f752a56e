"""Systems of two vLLM servers each, with half of the cores for each server.

All servers of a group are alive at once, and the systems of a group get the same load in turn. Each
group has the baseline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benches.shared import report
from benches.shared.connectors import Connector
from benches.shared.report import progress
from benches.shared.serving import Place
from lab.demo.engine import Engine
from lab.demo.servers import shares_of_cores, wait_until_ready
from lab.processes import ServerFailed

GROUP = 2
"""Systems beside the baseline that are measured together: each has two servers in memory."""
SIDES = ("kv_producer", "kv_consumer")
"""What the two servers are for each other, if they are not alike."""


class Pair:
    """Two servers of one kind."""

    def __init__(self, name: str, connector: Connector, *options: str, apart: bool = False) -> None:
        """Servers with these options of vLLM. `apart`: one stores and the other loads."""
        self.name = name
        self.connector = connector
        self.failure: str | None = None
        self.engines: list[Engine] = []
        self._options = options
        self._apart = apart

    def start(self, place: Place, *, kv_bytes: int, sequences: int) -> None:
        """Starts the servers."""
        place.prepare(self.name, self.connector)
        for side, cores in zip(SIDES, shares_of_cores(), strict=True):
            engine = place.start(
                f"{self.name} {side}",
                cores,
                self.connector,
                *self._options,
                kv_bytes=kv_bytes,
                sequences=sequences,
                **({"kv_role": side} if self._apart else {}),
            )
            self.engines.append(engine)


def started(
    place: Place,
    group: Sequence[Pair],
    then: Callable[[Pair], None],
    *,
    kv_bytes: int,
    sequences: int,
) -> list[Pair]:
    """Starts all servers, and does `then` with each system that is ready. Returns those that run;
    the others know their `failure`.

    Raises:
        Exception: the baseline, the first one, does not run.
    """

    def tried(pair: Pair, what: Callable[[Pair], object]) -> None:
        try:
            what(pair)
        except (ServerFailed, RuntimeError, OSError) as error:
            if pair is group[0]:
                raise
            pair.failure = report.cause(str(error))
            progress(f"{pair.name}: {error}")

    def start(pair: Pair) -> None:
        pair.start(place, kv_bytes=kv_bytes, sequences=sequences)

    def ready(pair: Pair) -> None:
        wait_until_ready(pair.engines, lambda number: None)
        then(pair)
        progress(f"{pair.name} is ready")

    for pair in group:
        tried(pair, start)
    for pair in running(group):
        tried(pair, ready)
    return running(group)


def running(group: Sequence[Pair]) -> list[Pair]:
    """The systems that have not failed."""
    return [pair for pair in group if pair.failure is None]


def shuffled(group: Sequence[Pair], seed: int) -> list[Pair]:
    """The systems in an order of their own for each seed."""
    return random.Random(seed).sample(group, len(group))


def failures(group: Sequence[Pair]) -> dict[str, str]:
    """Why systems do not run, by their names."""
    return {pair.name: pair.failure for pair in group if pair.failure is not None}
