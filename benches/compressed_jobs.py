"""What compression of values costs and brings: stores and loads over a server, with it and without.

It runs the engine's example `jobs`, whose blocks hold random numbers of bf16 with exponents spread
as those of KV are. The server is a Redis of its own: reached directly, and through a proxy that
lets so many Mbit/s through on each connection. Runs with and without compression take turns. Run it
as ``python -m benches.compressed_jobs``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from benches.shared import report
from benches.shared.rows import turns
from lab.network import Way
from lab.servers import PoolServer

OFF, LOSSLESS = "off", "lossless"
ROOT = Path(__file__).parents[1]
LINE = re.compile(
    r"BLHNC: store +(?P<store_mib_s>\S+) MiB/s \(released +\S+\), (?P<store_cpu_s_gib>\S+) CPU.*"
    r"load +(?P<load_mib_s>\S+) MiB/s, (?P<load_cpu_s_gib>\S+) CPU"
)
FIGURES = ("store_mib_s", "store_cpu_s_gib", "load_mib_s", "load_cpu_s_gib")


def run(url: str, compression: str, total_mib: int) -> dict[str, float]:
    """One run of the example: blocks of 1 MiB whose layers lie side by side."""
    cargo = ["cargo", "run", "--quiet", "--release", "--locked", "-p", "penstock-engine"]
    # Behind the sizes: get lanes, batch, copy lanes, rounds.
    words = ["1024", str(total_mib), "2", "8", "1", "5", str(int(compression == LOSSLESS))]
    said = subprocess.run(
        [*cargo, "--example", "jobs", "--", url, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found = LINE.search(said)
    assert found, said
    return {name: float(found[name]) for name in FIGURES}


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.compressed_jobs", description=__doc__)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--runs", type=int, default=5)
    args = report.begin(parser)
    runs: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        PoolServer("redis", Path(folder)) as server,
        Way(server.port) as way,
    ):
        way.be(mbit=args.mbit)
        pools = {
            "directly": (server.tcp_url, 128),
            "through the proxy": (f"redis://127.0.0.1:{way.port}", 32),
        }
        for pool, (url, total) in pools.items():
            for number, compression in turns((OFF, LOSSLESS), args.runs, warm_up=0):
                report.progress(f"{pool}: run {number + 1} of {args.runs}, {compression}")
                runs[pool, compression].append(run(url, compression, total))
    rows = []
    for (pool, compression), of in runs.items():
        medians = {figure: statistics.median(each[figure] for each in of) for figure in FIGURES}
        rows.append({"pool": pool, "compression": compression, **medians, "runs": of})
    columns = [(head, f"{{{head}}}") for head in ("pool", "compression", *FIGURES)]
    report.finish(args, report.listing(rows, columns), {"mbit": args.mbit, "rows": rows})


if __name__ == "__main__":
    main()
