"""The cost of Penstock when it finds nothing: `vllm bench serve`, against vLLM alone.

Two `vllm serve` processes with the same model live side by side. One of them has Penstock, with a
pool that was empty at the start. In every pass `vllm bench serve` drives one and then the other, in
changing order, with the same random prompts. No server gets a prompt twice. So every block is
looked up, computed and stored, and none is loaded. Run it as ``python -m benches.serve_cost``.
"""

from __future__ import annotations

import argparse
from typing import Any

from benches.shared import report, serving
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.report import progress
from benches.shared.rows import Times, turns
from benches.shared.systems import BASELINE, NAMES, every
from lab.demo.servers import wait_until_ready

FIGURES = {
    "request_throughput": "requests/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT p50, ms",
}
INPUT = "total_input_tokens"
COLUMNS = [("median (to vLLM alone)", "{label}")]
COLUMNS += [
    (head, f"{{{of}[median]:.2f}} (x{{{of}[to_plain]:.3f}})") for of, head in FIGURES.items()
]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all passes. Ratios are medians of those to vLLM alone, pass by pass."""
    connectors = {row: every()[row] for row in [BASELINE, *args.rows.split(",")]}
    times = Times()
    with serving.place() as place:
        servers = {}
        for row, connector in connectors.items():
            place.prepare(row, connector)
            servers[row] = place.start(row, serving.CORES, connector, kv_bytes=512 << 20)
        wait_until_ready(list(servers.values()), lambda ready: None)
        for number, row in turns(list(servers), args.passes):
            progress(f"pass {number + 1} of {args.passes}: {row}")
            found = place.drive(
                servers[row].url,
                args.prompts,
                dataset_name="random",
                random_input_len=args.input_tokens,
                random_output_len=args.output_tokens,
                max_concurrency=args.concurrency,
                seed=args.seed + number + 1,
                percentile_metrics="ttft,tpot",
            )
            for figure in (*FIGURES, INPUT):
                times.add(number, row, figure, found[figure])
    return [
        {"row": row, "label": connector.label, "input_tokens": times.each(row, INPUT)}
        | {
            figure: {
                "median": times.median(row, figure),
                "to_plain": times.ratio(row, BASELINE, figure),
                "each": times.each(row, figure),
            }
            for figure in FIGURES
        }
        for row, connector in connectors.items()
    ]


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.serve_cost", description=__doc__)
    parser.add_argument("--rows", default="penstock-file", help=f"of {','.join(NAMES)}")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=40, help="requests of a pass")
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    rows = run(args)
    report.finish(args, report.listing(rows, COLUMNS), {"rows": rows})


if __name__ == "__main__":
    main()
