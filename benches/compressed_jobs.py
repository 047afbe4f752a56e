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
from pathlib import Path
from typing import Any

from benches import report
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
    parser = argparse.ArgumentParser(prog="benches.compressed_jobs", description=__doc__)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--runs", type=int, default=5)
    args = report.begin(parser)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, PoolServer("redis", Path(folder)) as server:
        port = int(server.tcp_url.rsplit(":", 1)[1].split("/")[0])
        with Way(port) as way:
            way.be(mbit=args.mbit)
            for name, url, total in [
                ("directly", server.tcp_url, 128),
                ("through the proxy", f"redis://127.0.0.1:{way.port}", 32),
            ]:
                runs: dict[str, list[dict[str, float]]] = {OFF: [], LOSSLESS: []}
                for number in range(args.runs):
                    report.progress(f"{name}: run {number + 1} of {args.runs}")
                    for compression, of in runs.items():
                        of.append(run(url, compression, total))
                for compression, of in runs.items():
                    medians = {f: statistics.median(each[f] for each in of) for f in FIGURES}
                    rows.append({"pool": name, "compression": compression, **medians, "runs": of})
    heads = ["pool", "compression", *FIGURES]
    cells = [[str(row[head]) for head in heads] for row in rows]
    report.finish(args, report.table(heads, cells), {"mbit": args.mbit, "rows": rows})


if __name__ == "__main__":
    main()
