"""A vLLM engine in a process of its own, driven over its standard input and output.

:mod:`lab.engines.program` runs in that process; :class:`Node` is its other end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lab.waiting import eventually

if TYPE_CHECKING:
    from lab.engines.forks import Fork

_CORES = os.cpu_count() or 1
_nodes = itertools.count()

START_TIMEOUT = 400.0
_ENDED = {"error": "the engine process ended"}
ANSWER_TIMEOUT = 180.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the engine said to one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    """Prompt tokens that vLLM counts as cached, locally or from the pool."""
    finish: str
    seconds: float
    params: dict[str, Any] | None = None
    """The `kv_transfer_params` that it has for another engine."""

    @property
    def text(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What must be equal bit for bit."""
        return self.tokens, self.logprobs


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, as a request names it."""

    lora_name: str
    lora_int_id: int
    lora_path: str


def new_process(
    args: dict[str, Any], log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Starts an engine as vLLM does: every process of it imports vLLM anew."""
    with log.open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "lab.engines.program", json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=environment,
            start_new_session=True,
        )


STORE_LIMITS = ("penstock.store_timeout", "penstock.store_wait")

SHORT_LIMITS: dict[str, Any] = {
    "penstock.lookup_timeout": 1.0,
    "penstock.load_timeout": 4.0,
    **dict.fromkeys(STORE_LIMITS),
}
"""Settings of an engine whose pool fails: how long each failure is waited for. Stores have
Penstock's own limits."""


class Node:
    """An engine process. Use as a context manager; leaving it kills the process, unless `keep`
    takes it. vLLM's own end takes seconds, and few tests are about it: those call `stop`.

    `launch` starts the process: :func:`new_process`, or :class:`lab.engines.forks.Fork`. `prepare`
    names what the process calls before it starts the engine, as ``module:function``.
    """

    keep: Callable[[Node], bool] | None = None
    """Whether somebody else goes on with the engine, who then has it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        pool: str | None = None,
        settings: dict[str, Any] | None = None,
        role: str = "kv_both",
        env: dict[str, str] | None = None,
        prepare: str | None = None,
        launch: Callable[..., subprocess.Popen[bytes] | Fork] = new_process,
        **engine_args: Any,
    ) -> None:
        args: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 128 << 20,
            "dtype": "float32",
            "disable_log_stats": False,
        } | engine_args
        if pool is not None:
            args["kv_transfer_config"] = {
                "kv_connector": "PenstockConnector",
                "kv_connector_module_path": "penstock.vllm.connector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector_settings(pool, settings),
            }
        if prepare is not None:
            args["prepare"] = prepare
        self.log = log
        environ = os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {})
        # Left alone, vLLM computes with another number of threads when there is a connector, and
        # sums in another order: outputs compare bit for bit only with the same number.
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(next(_nodes) % _CORES))
        # Standard output is for answers.
        environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
        self.process = launch(args, log, environ)
        self._is_ready = False
        self.is_renewable = False
        """Whether it goes on as good as new: see :meth:`renew`."""
        self._counted: dict[str, float] = {}
        """By whoever had it before."""
        self._start_log = ""
        self._has_images = False
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {0: queue.Queue()}
        self._has_ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Node:
        self.wait_ready()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.leave()
        else:
            self.kill()

    def leave(self) -> None:
        """Ends the process, if nobody goes on with it."""
        kept = False
        try:
            kept = self.keep is not None and self.keep(self)
        finally:
            if not kept:
                self.kill()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when the engine serves.

        Raises:
            StartError: it does not come up, with the log's end.
            queue.Empty: it takes longer than `timeout` seconds.
        """
        if self._is_ready:
            return
        try:
            ready = self._waiting[0].get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise
        if "ready" not in ready:
            raise StartError(self.log.read_text()[-6000:])
        self._is_ready = True
        self.is_renewable = ready["renewable"]
        # What connectors say is said again by the next one.
        said = self.log.read_text(errors="replace").splitlines(keepends=True)
        self._start_log = "".join(
            line for line in said if "Penstock" not in line or "KV layout" in line
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith(b'{"id"'):
                continue
            message = json.loads(line)
            self._waiting.setdefault(message["id"], queue.Queue()).put(message)
        self._has_ended = True
        for waiting in list(self._waiting.values()):
            waiting.put(_ENDED)

    def send(self, operation: str, **arguments: Any) -> int:
        """Starts an operation; returns its number for `result`."""
        number = next(self._ids)
        self._waiting[number] = queue.Queue()
        assert self.process.stdin is not None
        line = json.dumps({"id": number, "op": operation} | arguments) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        if self._has_ended:
            # Nobody reads any more, and whoever waited then has been told.
            self._waiting[number].put(_ENDED)
        return number

    def result(self, number: int, timeout: float = ANSWER_TIMEOUT) -> Any:
        """Waits for an operation's result."""
        message = self._waiting[number].get(timeout=timeout)
        if "error" in message:
            raise RuntimeError(message["error"] + "\n" + self.log.read_text()[-4000:])
        return message["result"]

    def start(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
        trace_headers: dict[str, str] | None = None,
        params: dict[str, Any] | None = None,
        images: Sequence[int] = (),
        image_names: Sequence[str] = (),
        priority: int = 0,
        **sampling: Any,
    ) -> int:
        """Starts a request; returns its number for `answer` and `abort`. `params` are its
        `kv_transfer_params`. `images` are numbers of pictures, one for each placeholder of the
        prompt; `image_names` are what the client calls them, if it does."""
        # vLLM keeps what it loaded of an adapter.
        self.is_renewable &= adapter is None
        self._has_images |= bool(images)
        if params is not None:
            sampling["extra_args"] = {"kv_transfer_params": params}
        return self.send(
            "generate",
            prompt=prompt,
            max_tokens=max_tokens,
            salt={} if cache_salt is None else {"cache_salt": cache_salt},
            images=list(images),
            image_names=list(image_names),
            adapter=adapter and dataclasses.asdict(adapter),
            trace_headers=trace_headers,
            priority=priority,
            sampling=sampling,
        )

    def load_adapter(self, adapter: Adapter, *, in_place: bool = False) -> None:
        """Loads a LoRA adapter, as vLLM's server does when it is asked to at run time."""
        self.is_renewable = False
        asked = dataclasses.asdict(adapter) | {"load_inplace": in_place}
        assert self.result(self.send("load_adapter", adapter=asked))

    def answer(self, number: int, timeout: float = ANSWER_TIMEOUT) -> Answer:
        """Waits for a request's answer."""
        result = self.result(number, timeout)
        return Answer(
            tuple(result["tokens"]),
            tuple(result["logprobs"]),
            result["cached"],
            result["finish"],
            result["seconds"],
            result["params"],
        )

    def ask(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> Answer:
        """Sends a request, with `start`'s options, and waits for its answer."""
        return self.answer(self.start(prompt, max_tokens, **options))

    def abort(self, number: int) -> None:
        """Aborts a request, also one that the engine is still about to take: vLLM ignores those."""
        self.result(self.send("abort", request=number))

    def forget(self, timeout: float = 120.0, small: Callable[[Node], object] | None = None) -> None:
        """Empties the engine's own prefix cache. vLLM refuses while a request holds blocks, and
        those of a load that was aborted, or of stores, are held until a step that reports the end:
        this runs `small` requests until then."""

        def emptied() -> bool:
            if self.reset():
                return True
            if small is None:
                self.ask([7, 8, 9], max_tokens=2)
            else:
                small(self)
            return False

        eventually(emptied, "no request holds blocks", seconds=timeout, pause=0)

    def reset(self, *, running: bool = False, pool: bool = False) -> bool:
        """Empties the engine's own prefix cache, of `running` requests too, and has Penstock forget
        what the `pool` has. Returns whether vLLM did so."""
        return bool(self.result(self.send("reset", running=running, pool=pool)))

    def forget_images(self) -> None:
        """Empties vLLM's cache of what it made of images."""
        self.result(self.send("forget_images"))

    def call(self, method: str, **options: Any) -> Any:
        """Calls a method in all workers, as clients of vLLM do (`collective_rpc`)."""
        # It may change their weights.
        self.is_renewable = False
        return self.result(self.send("call", method=method, options=options))

    def set_weight_version(self, name: str) -> None:
        """Names the weights, as trainers do once they have pushed them."""
        self.is_renewable = False
        self.result(self.send("set_weight_version", name=name))

    def pause(self, mode: str = "keep", *, clear: bool = True) -> None:
        """Holds all requests, or aborts them, by vLLM's `mode`. With `clear`, vLLM empties its
        prefix cache then."""
        self.result(self.send("pause", mode=mode, clear=clear))

    def resume(self) -> None:
        """Goes on after a pause."""
        self.result(self.send("resume"))

    def way(self, way: str, prompt: list[int]) -> Any:
        """Asks in a way of one's own: `way` names a function, as ``module:function``. It is called
        with vLLM's engine, the prompt, and a name for requests; what it returns is returned."""
        self.is_renewable = False
        return self.result(self.send("way", way=way, prompt=prompt))

    def counters(self) -> dict[str, float]:
        """Penstock's counters, as vLLM's metrics show them, plus vLLM's preemptions. And
        `unfinished_requests`: those that were sent to the engine, and are not answered."""
        counters: dict[str, float] = self.result(self.send("counters"))
        return {name: value - self._counted.get(name, 0) for name, value in counters.items()}

    def part(self) -> bool:
        """Ends the connector of an engine that is to go on with another. Returns whether it could:
        not if requests are left, or blocks are held.

        Raises:
            RuntimeError: the connector does not end as it should.
        """
        if self.process.poll() is not None or self.counters()["unfinished_requests"]:
            return False
        if self._has_images:
            self.forget_images()
        # Blocks of stores are held until a step reports their end.
        for _ in range(10):
            if self.reset():
                self.result(self.send("part"))
                return True
            self.ask([7, 8, 9], max_tokens=2)
        return False

    def renew(self, log: Path, pool: str, settings: dict[str, Any] | None) -> None:
        """Goes on after :meth:`part` with a new connector, counters at nothing, and a log of its
        own.

        Raises:
            StartError: the connector refuses, with the log's end.
        """
        log.write_text(self._start_log)
        self.log = log
        renewed = self.send("renew", extra=connector_settings(pool, settings), log=str(log))
        try:
            self.result(renewed)
        except RuntimeError as error:
            raise StartError(str(error)) from error
        self._counted = {}
        counters = self.counters()
        del counters["unfinished_requests"]
        self._counted = counters

    def wait_for(self, counter: str, at_least: float, timeout: float = 120.0) -> None:
        """Waits until a counter is high enough. Idle engines report with their next step, so
        this runs a small request now and then.

        Raises:
            TimeoutError: it never is.
        """

        def is_high_enough() -> bool:
            if self.counters().get(counter, 0) >= at_least:
                return True
            self.ask([7, 8, 9], max_tokens=2)
            return False

        eventually(
            is_high_enough,
            lambda: f"{counter} is {at_least}: {self.counters()}",
            seconds=timeout,
            pause=0.05,
        )

    def stop(self, timeout: float = 120.0) -> int:
        """Ends the engine as vLLM would, and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it did not end in `timeout` seconds. It is killed then.
        """
        try:
            if self.process.poll() is None:
                assert self.process.stdin is not None
                self.process.stdin.close()
            return self.process.wait(timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the process and all its children at once, and removes the shared memory that vLLM
        removes at an orderly end."""
        segments = _shared_memory_of(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)


def _shared_memory_of(pid: int) -> set[Path]:
    """vLLM's segments that a process and its children have mapped: queues, and what ranks exchange.
    Penstock's outlast their engines."""
    found: set[Path] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {Path(name) for name in re.findall(r"/dev/shm/(?:psm|vllm)_\S+", maps)}
    return found


def connector_settings(pool: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """A connector's `kv_connector_extra_config` for tests."""
    extra: dict[str, Any] = {
        "penstock.pool": pool,
        "penstock.host_bytes": "128MiB",
        # Loads come from the pool, and always, as most tests are about that.
        "penstock.host_tier": False,
        "penstock.load_policy": "always",
        # Generous, so that a busy machine does not turn hits into misses.
        "penstock.lookup_timeout": 10.0,
        "penstock.load_timeout": 20.0,
        # Nor loses blocks on their way there.
        **dict.fromkeys(STORE_LIMITS, 60.0),
    }
    extra |= settings or {}
    # None stands for Penstock's own default.
    return {key: value for key, value in extra.items() if value is not None}


class StartError(RuntimeError):
    """The engine did not come up; the message is the end of its log."""
