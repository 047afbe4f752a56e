"""Server processes end with the program that started them, whatever they do about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lab.processes import (
    Interrupted,
    Interruption,
    Processes,
    Server,
    ServerFailed,
    free_port,
)
from lab.servers import start_pool_server
from lab.waiting import LIMIT, eventually

# A parent that starts a child, which starts another; none of them listens to polite requests.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if int(sys.argv[1]):
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(int(sys.argv[1]) - 1), sys.argv[2]])
open(f"up-{sys.argv[1]}", "w").close()
time.sleep(600)
"""


def left_in(folder: Path) -> list[str]:
    """The programs that run in a folder, by which all that descends from a server is known."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.pid != os.getpid():
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def check_until_it_raises(server: Server) -> None:
    eventually(lambda: server.check(deadline=LIMIT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_left_of_servers_that_do_not_want_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.processes._GRACE_SECONDS", 0.5)
    with Interruption() as interruption, Processes(interruption) as processes:
        command = [sys.executable, "-c", STUBBORN, "2", STUBBORN]
        processes.start("stubborn", command, folder / "log")
        eventually(lambda: all((folder / f"up-{n}").exists() for n in range(3)))
        assert len(left_in(folder)) == 3
    assert left_in(folder) == []


def test_the_first_signal_interrupts_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_held_signal_is_raised_at_the_end_of_the_hold() -> None:
    reached = []

    def held(interruption: Interruption) -> None:
        with interruption.held():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(True)
        reached.append(False)

    with Interruption() as interruption, pytest.raises(Interrupted):
        held(interruption)
    assert reached == [True]


def test_a_server_that_ends_shows_the_end_of_its_log(folder: Path) -> None:
    with Interruption() as interruption, Processes(interruption) as processes:
        command = ["sh", "-c", "seq 100; echo no such model >&2; exit 3"]
        server = processes.start("server A", command, folder / "log")
        with pytest.raises(ServerFailed) as caught:
            check_until_it_raises(server)
    message = str(caught.value)
    assert "server A ended with status 3" in message
    assert "no such model" in message
    assert "  5\n" not in message


def test_a_server_that_is_not_ready_in_time(folder: Path) -> None:
    with Interruption() as interruption, Processes(interruption) as processes:
        server = processes.start("server B", ["sleep", "600"], folder / "log")
        with pytest.raises(ServerFailed, match="not ready"):
            server.check(deadline=0.0)


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_pool_server_serves_only_inside_its_folder(folder: Path, kind: str) -> None:
    with Interruption() as interruption:
        with Processes(interruption) as processes:
            url = start_pool_server(processes, kind, folder)
            assert url == f"{kind}+unix://{folder / kind}.sock"
            server = next(p for p in psutil.process_iter() if p.pid in _children())
            assert not [c for c in server.net_connections("tcp") if c.status == "LISTEN"]
        assert left_in(folder) == []


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_a_pool_server_that_is_not_installed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with (
        Interruption() as interruption,
        Processes(interruption) as processes,
        pytest.raises(ServerFailed, match="valkey-server is not installed"),
    ):
        start_pool_server(processes, "valkey", folder)


# A program that starts a server and never ends it.
CARELESS = """
import sys, time
from pathlib import Path
from lab.processes import Server
print(Server("the server", ["sleep", "600"], Path("log")).pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_a_program_that_is_killed(folder: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", CARELESS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        eventually(lambda: server.name() == "sleep")
        starter.kill()
    eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_a_server_is_stopped_with_all_that_it_started(folder: Path) -> None:
    command = ["sh", "-c", "sleep 600 & touch up; wait"]
    server = Server("a server and its child", command, folder / "log")
    eventually((folder / "up").exists)
    server.stop()
    assert left_in(folder) == []


LISTENING = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_a_server_answers_at_its_port_or_says_why_not(folder: Path) -> None:
    port = free_port()
    with Interruption() as interruption, Processes(interruption) as processes:
        command = [sys.executable, "-c", LISTENING, str(port)]
        processes.start("one", command, folder / "one").wait_for_port(port)
        command = ["sh", "-c", "echo no port >&2; exit 3"]
        other = processes.start("another", command, folder / "another")
        with pytest.raises(ServerFailed) as caught:
            other.wait_for_port(free_port())
    assert "another ended with status 3" in str(caught.value)
    assert "no port" in str(caught.value)


def test_free_ports_are_free() -> None:
    assert 1024 <= free_port() <= 65535
