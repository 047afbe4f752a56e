"""A loopback of this process's own, as fast as a network: what it starts from then on uses it."""

from __future__ import annotations

import ctypes
import os
import subprocess

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of <sched.h>."""


def limit(mbit: float) -> None:
    """Moves this process into a network namespace whose loopback carries `mbit` Mbit/s in all.

    It needs root, and the programs ip and tc. Call it before threads are started.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"no network namespace of its own: {os.strerror(code)}; run it as root")
    # A millisecond's worth, and at least two of the largest segments.
    burst = max(128_000, int(mbit * 125))
    shape = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 50ms"
    for command in ("ip link set lo up", shape):
        subprocess.run(command.split(), check=True)
