"""A demo whose servers a real Prometheus scrapes, and `penstock top` watches.

Run as a program, it records what the dashboard's queries give over a demo, for the pictures in
the docs: `python -m tests.watched FILE`, then `python -m scripts.docs.dashboard` and
`python -m scripts.docs.top`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from lab.prometheus import Prometheus
from lab.waiting import eventually
from penstock.exposition import totals
from tests.dashboard import DASHBOARD, as_sent

ROOT = Path(__file__).parents[1]
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
DEMO: tuple[str, ...] = (sys.executable, "-m", "lab.demo")
START_SECONDS = 420.0
STOP_SECONDS = 240.0
WHOLE_SECONDS = 900.0
"""Of a whole demo. As the others, it only ends what hangs."""
_LOADS = "vllm:penstock_loads_total"
_INTERVAL = "15s"
"""The time that the recorded rates are taken over."""


def start_demo(
    folder: Path, *options: str, material: tuple[str, ...] = ("--conversations", "1")
) -> subprocess.Popen[str]:
    """A demo that runs in `folder`, and so does everything that it starts."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [*DEMO, *material, "--json", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_in(folder: Path) -> Iterator[psutil.Process]:
    """The processes that run in `folder`."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                yield process


class WatchedDemo:
    """A demo that has begun to load, with a Prometheus beside it. Use as a context manager.

    Prometheus calls its two servers with a pool `server 1` and `server 2`.
    """

    def __init__(self, folder: Path, *options: str, conversations: int = 4) -> None:
        material = ("--conversations", str(conversations))
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.demo = start_demo(folder, *options, material=material)

    def __enter__(self) -> WatchedDemo:
        try:
            self._wait(lambda: len(_engines(self._folder)) == 2)
            self.engines = _engines(self._folder)
            names = {f"server {n}": each for n, each in enumerate(self.engines, 1)}
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            self.prometheus = self._stack.enter_context(Prometheus(Path(folder), names))
            self.began = time.time()
            self._wait(lambda: sum(_loads(each) or 0 for each in self.engines) > 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.demo.poll() is None:
            self.demo.terminate()
            self.demo.communicate(timeout=STOP_SECONDS)
        self._stack.close()

    def finish(self) -> tuple[dict[str, Any], str]:
        """Waits for the demo's end. Returns its figures, and what it wrote to standard error."""
        out, err = self.demo.communicate(timeout=WHOLE_SECONDS)
        self.ended = time.time()
        assert self.demo.returncode == 0, err
        figures: dict[str, Any] = json.loads(out)
        return figures, err

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The demo sends nothing meanwhile, and does not end. Its servers go on."""
        self.demo.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.demo.send_signal(signal.SIGCONT)

    def top(self, *options: str) -> list[str]:
        """The command `penstock top` over the two servers."""
        return [PENSTOCK, "top", *self.engines, *options]

    def _wait(self, condition: Any) -> None:
        def holds() -> bool:
            assert self.demo.poll() is None, self.demo.communicate()[1]
            return bool(condition())

        eventually(holds, seconds=START_SECONDS, pause=0.25)


def _engines(folder: Path) -> list[str]:
    """host:port of each vLLM server with a pool that runs in `folder`."""
    found = set()
    for process in processes_in(folder):
        with contextlib.suppress(psutil.Error):
            # vLLM's workers listen too, for each other: nobody else may connect to them.
            if process.name().startswith("VLLM::"):
                continue
            for each in process.net_connections("tcp4"):
                address = f"{each.laddr[0]}:{each.laddr[1]}"
                if each.status == psutil.CONN_LISTEN and _loads(address) is not None:
                    found.add(address)
    return sorted(found)


def _loads(address: str) -> float | None:
    """The loads of a server; None if it is no vLLM server with a pool, or does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return totals(answer.read().decode()).get(_LOADS)
    except (OSError, ValueError):
        return None


def record(watched: WatchedDemo) -> dict[str, Any]:
    """What each query of the dashboard gave, every second from Prometheus's start to the demo's
    end."""
    panels = {}
    for panel in DASHBOARD["panels"]:
        series = {}
        for target in panel["targets"]:
            for found in watched.prometheus.query_range(
                as_sent(target["expr"], _INTERVAL), watched.began, watched.ended, 1.0
            ):
                name = target["legendFormat"]
                for label, value in found["metric"].items():
                    name = name.replace("{{" + label + "}}", value)
                # What Prometheus cannot say is no point: nothing happened to measure.
                series[name.replace("{{tenant}}", "no tenant")] = [
                    [round(moment - watched.began), float(f"{float(value):.4g}")]
                    for moment, value in found["values"]
                    if math.isfinite(float(value))
                ]
        panels[panel["title"]] = series
    return {
        "interval": _INTERVAL,
        "seconds": round(watched.ended - watched.began),
        "panels": panels,
    }


def _moved(reading: dict[str, Any]) -> float:
    """Bytes a second that came from the pool, by a reading of `penstock top`."""
    return sum(each.get("pool_bytes") or 0 for each in reading["engines"].values())


def main() -> None:
    """Records a demo of `make demo`'s size."""
    with tempfile.TemporaryDirectory() as name, WatchedDemo(Path(name), conversations=8) as watched:
        top = subprocess.Popen(watched.top("--json"), stdout=subprocess.PIPE, text=True)
        try:
            watched.finish()
        finally:
            top.send_signal(signal.SIGINT)
            readings = [json.loads(line) for line in top.communicate()[0].splitlines()]
        busiest = max(readings, key=_moved)
        recorded = record(watched) | {"top": busiest}
        Path(sys.argv[1]).write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
