"""A real Valkey or Redis cluster for tests: three primaries with a replica each, on loopback."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lab.waiting import eventually
from tests.servers import Server

NODES = 6
NODE_TIMEOUT_MS = 1500
"""After so long a silent primary is replaced by its replica, once a test has asked for that."""
PATIENT_MS = 20_000
"""Before that: no machine is so busy that a node seems dead."""


class Cluster:
    """Six servers that know each other. Use as a context manager."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self.servers: list[Server] = []
        for number in range(NODES):
            own = folder / str(number)
            own.mkdir(parents=True)
            self.servers.append(
                Server(
                    kind,
                    own,
                    *("--cluster-enabled", "yes"),
                    *("--cluster-node-timeout", str(PATIENT_MS)),
                    *("--cluster-replica-validity-factor", "0"),
                    *("--cluster-require-full-coverage", "no"),
                    cluster=True,
                )
            )

    @property
    def url(self) -> str:
        """By two of its nodes: either may be the one that is gone."""
        first, second = (server.port for server in self.servers[:2])
        return f"{self._kind}+cluster://127.0.0.1:{first},127.0.0.1:{second}"

    def __enter__(self) -> Cluster:
        try:
            for server in self.servers:
                server.start()
            places = [f"127.0.0.1:{server.port}" for server in self.servers]
            self._cli("create", *places, "--cluster-replicas", "1", "--cluster-yes")
            self.wait_until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    def wait_until_whole(self) -> None:
        """Until every server is reached and each primary has its replica, as all of them see it."""
        eventually(lambda: all(self._is_whole(server) for server in self.servers))

    def primaries(self) -> list[Server]:
        """Those that serve slots now, as one that is not gone sees it."""
        nodes = self._nodes()
        return [s for s in self.servers if "master" in nodes.get(s.port, "") and s.process]

    def replace_silent_nodes(self) -> None:
        """From now on a primary that falls silent is replaced soon."""
        for server in self.servers:
            said = server.command("CONFIG", "SET", "cluster-node-timeout", str(NODE_TIMEOUT_MS))
            assert said == b"+OK\r\n", said

    def move_slots(self, count: int) -> None:
        """Moves so many slots, with what is in them, from one primary to another."""
        nodes = self._nodes()
        source, target = self.primaries()[:2]
        identity = {port: line.split()[0] for port, line in nodes.items()}
        self._cli(
            "reshard",
            f"127.0.0.1:{source.port}",
            *("--cluster-from", identity[source.port]),
            *("--cluster-to", identity[target.port]),
            *("--cluster-slots", str(count)),
            "--cluster-yes",
        )

    def _nodes(self) -> dict[int, str]:
        """What a node says of each, by port."""
        for server in self.servers:
            if server.process is None:
                continue
            said = server.command("CLUSTER", "NODES").decode(errors="replace")
            lines = [line for line in said.splitlines() if "@" in line and "fail" not in line]
            return {int(line.split()[1].split("@")[0].rsplit(":", 1)[1]): line for line in lines}
        return {}

    def _is_whole(self, server: Server) -> bool:
        info = server.command("CLUSTER", "INFO")
        nodes = server.command("CLUSTER", "NODES")
        return (
            b"cluster_state:ok" in info
            and b"cluster_slots_assigned:16384" in info
            and nodes.count(b" connected") == NODES
            and nodes.count(b"slave") == NODES // 2
        )

    def _cli(self, *words: str) -> None:
        program = shutil.which(f"{self._kind}-cli")
        assert program is not None, f"{self._kind}-cli comes with the server's package"
        done = subprocess.run(
            [program, "--cluster", *words], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
