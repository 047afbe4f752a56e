"""Engines whose processes are forked from one that has imported vLLM already.

An engine is three processes and more, each of which imports vLLM for ten seconds when it is started
anew; nearly all of a test would be that. Only how processes come into being and how they wait for
each other differs: what runs in them is vLLM as it is. `test_demo` starts engines as operators do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import IO, Any

# One thread in every process, to whichever core vLLM binds it: what is forked keeps the number of
# threads that its parent was loaded with. vLLM looks for n-grams with numba: threads of its own, on
# that same core, took half a second for a token.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


MILLISECONDS = 5
"""How long a process asks its queue over and over, and how long it waits at most until it asks
again."""
DOUBLED = 8
"""How often a process asks until it waits twice as long, and how often that is doubled."""


NEVER = float("-inf")

AHEAD = "lab.engines.async_on_cpu:keep_asynchronous_scheduling"
"""What makes an engine schedule steps ahead."""

EXCHANGES = "0.32."
"""The versions of vLLM whose engines can go on with another connector (`lab.engines.exchange`)."""


RANKS = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
IN_THE_CORE = {"distributed_executor_backend": "uni"}
"""Where a single rank runs on a GPU: in the process of the engine core. On a CPU vLLM gives it a
process of its own, only to set its OpenMP threads, which are set here already. Then each step takes
half as long again."""
LEFT_IN_THE_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""With this, vLLM's CPU platform leaves it there. An asynchronous engine has processes anyway."""


def _placed(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """An engine's options, and what its environment needs besides. Several ranks run beside each
    other, and so do steps that are scheduled ahead."""
    beside = any(args.get(ranks, 1) > 1 for ranks in RANKS) or args.get("prepare") == AHEAD
    if beside or "distributed_executor_backend" in args:
        return args, {}
    return args | IN_THE_CORE, LEFT_IN_THE_CORE


class Fork:
    """An engine's process, with what a node uses of :class:`subprocess.Popen`."""

    def __init__(self, args: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        args, placed = _placed(args)
        environment = environment | ENVIRONMENT | placed
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lab.engines.preloaded"])
        to_read, to_ask = context.Pipe(duplex=False)
        to_hear, to_answer = context.Pipe(duplex=False)
        with to_read, to_ask, to_hear, to_answer:
            self._process = context.Process(
                target=_run, args=(args, log, environment, to_read, to_answer)
            )
            # The first start is that of the process that imports.
            with _environment(ENVIRONMENT):
                self._process.start()
            self.stdin: IO[bytes] | None = os.fdopen(os.dup(to_ask.fileno()), "wb")
            self.stdout: IO[bytes] | None = os.fdopen(os.dup(to_hear.fileno()), "rb")
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it did not end in `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked engine", timeout)
        return self._process.exitcode


def penstock(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the command `penstock` does, in a process that has imported vLLM. Its output goes
    through files in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.engines.preloaded"])
    out, err = folder / "stdout", folder / "stderr"
    with _environment(ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}):
        process = context.Process(target=_command, args=(arguments, out, err))
        process.start()
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(
        arguments, process.exitcode, out.read_text(), err.read_text()
    )


def _command(arguments: tuple[str, ...], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    _look_at_models_in_forks()
    from penstock.cli import main

    sys.exit(main(list(arguments)))


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    args: dict[str, Any],
    log: Path,
    environment: dict[str, str],
    requests: Connection,
    answers: Connection,
) -> None:
    """The engine's process, from its fork on."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        for number, source in enumerate((requests.fileno(), answers.fileno(), file.fileno())):
            os.dup2(source, number)
    requests.close()
    answers.close()
    sys.stdin = os.fdopen(0, closefd=False)

    # vLLM's CPU platform asks for new processes, which would import anew.
    get_context = multiprocessing.get_context

    def forked(method: str | None = None) -> BaseContext:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forked  # type: ignore[assignment]

    _wait_without_spinning()
    _look_at_models_in_forks()
    _exchange_connectors()
    from lab.engines import program

    program.main(args)


def _wait_without_spinning() -> None:
    """vLLM's processes ask their queues over and over for a second after each message. Where
    several engines share two cores, this takes a core from those that compute."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def waits(self: Any, timeout_ms: int | None = None) -> None:
        asked = self.asked + 1 if self.last_read == NEVER else 0
        if self.last_read + MILLISECONDS / 1000 < time.monotonic():
            # It is taken for idle, and waits for its socket. Who writes first may have done so
            # before the reader listened.
            self.last_read = NEVER
        self.asked = asked
        most = MILLISECONDS << min(asked // DOUBLED, DOUBLED)
        wait(self, most if timeout_ms is None else min(most, timeout_ms))

    SpinCondition.asked = 0
    SpinCondition.wait = waits


def _exchange_connectors() -> None:
    """Where the version of vLLM is the one that all tests run with. Model runner V2 keeps its
    connector in more places."""
    import vllm

    if vllm.__version__.startswith(EXCHANGES) and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        from lab.engines import exchange

        exchange.allow()


def _look_at_models_in_forks() -> None:
    """vLLM finds out what a model can do in a process of its own, which would import anew."""
    from vllm.model_executor.models import registry

    def forked(look: Callable[[], Any]) -> Any:
        context = multiprocessing.get_context("fork")
        to_hear, to_answer = context.Pipe(duplex=False)
        with to_hear, to_answer:
            process = context.Process(target=lambda: to_answer.send(look()))
            process.start()
            to_answer.close()
            try:
                return to_hear.recv()
            except EOFError as error:
                raise RuntimeError("a model's class was not looked at: see above") from error
            finally:
                process.join()

    registry._run_in_subprocess = forked
