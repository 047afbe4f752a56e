"""`penstock plan`: plans KV memory over a pipeline, before anything is started."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock.cli import words
from penstock.errors import ConfigError
from penstock.plan import config, plot, proposal, table, weights
from penstock.plan.kv import KvSizes, Serving
from penstock.plan.model import Model, default_partition
from penstock.plan.partition import Device, Partition, Planner
from penstock.plan.proposal import Plan

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_KV_BYTES = {"auto": None, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}
_UTILIZATION = 0.92
"""vLLM's default of --gpu-memory-utilization."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "plan",
        help="plan KV memory over the ranks of a pipeline",
        description="Shows what KV memory holds on each rank of a pipeline whose stages differ: "
        "split uniformly, as vLLM does, and in proportion to what the layers need. With the "
        "devices' memory it finds the partition that holds the most tokens. Reads a Hugging Face "
        "configuration; needs neither a GPU nor vLLM.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="model folder, or a config.json")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument(
        "--pp", metavar="N,N,...", type=_numbers, help="layers of each rank, as 48,16"
    )
    ranks.add_argument(
        "--pp-size",
        metavar="N",
        type=words.count_argument,
        help="number of ranks: vLLM's partition, or the best one with --device-memory",
    )
    parser.add_argument("--tp", metavar="N", type=words.count_argument, default=1)
    _add_memory(parser)
    _add_serving(parser)
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="write the plan as an SVG picture"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds options for the memory to split, and for the devices that have it."""
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        type=words.size_argument,
        help="KV memory: of each rank, as vLLM has it; with --enable-pp-prop-kv-cache of all ranks "
        "together",
    )
    amount.add_argument(
        "--kv-cache-tokens",
        metavar="N",
        type=words.count_argument,
        help="tokens to hold, instead: shows the memory that they need",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE,SIZE,...",
        type=_sizes,
        help="memory of each rank's device; one size stands for all",
    )
    parser.add_argument(
        "--device-speed",
        metavar="X,X,...",
        type=_speeds,
        help="relative speed of each rank's device: shows what balance costs in tokens",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=_share,
        default=_UTILIZATION,
        help="share of a device's memory that vLLM may use (default: %(default)s)",
    )
    parser.add_argument(
        "--reserve",
        metavar="SIZE",
        type=words.size_argument,
        help="memory of a device for activations and the runtime (default: an estimate, shown)",
    )
    parser.add_argument(
        "--enable-pp-prop-kv-cache",
        action="store_true",
        help="--kv-cache-memory-bytes is the total that is split in proportion, and the commands "
        "shown ask for that; not for vLLM's own split",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's options that decide the size and the number of blocks."""
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=words.count_argument,
        help="tokens of the longest request (default: the model's)",
    )
    parser.add_argument(
        "--max-num-batched-tokens", metavar="N", type=words.count_argument, default=8192
    )
    parser.add_argument(
        "--concurrent-batches",
        metavar="N",
        type=words.count_argument,
        help="batches under way at once, for layers with windows (default: the ranks and one, as "
        "with asynchronous scheduling)",
    )
    parser.add_argument("--block-size", metavar="N", type=words.count_argument, default=16)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="what the model computes in (default: 16 bits)",
    )
    parser.add_argument(
        "--kv-dtype", choices=tuple(_KV_BYTES), default="auto", help="(default: the model's)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    configuration, folder = config.load(args.model)
    model = weights.weigh(config.estimate(configuration, args.dtype), folder)
    serving = Serving(
        block_size=args.block_size,
        tp=args.tp,
        element_bytes=_KV_BYTES[args.kv_dtype],
        max_length=args.max_model_len,
        batched_tokens=args.max_num_batched_tokens,
        concurrent_batches=args.concurrent_batches or 1 + (args.pp_size or len(args.pp)),
    )
    sizes = KvSizes(model, serving)
    reserve = args.reserve or proposal.reserve(model, serving)
    devices = _devices(args, reserve)
    candidates, frontier = _candidates(args, model, sizes, devices)
    plans = {
        name: proposal.plan(
            model,
            sizes,
            serving,
            partition,
            memory=_total(args, len(partition)),
            tokens=args.kv_cache_tokens,
            devices=devices,
        )
        for name, partition in candidates.items()
    }
    chosen = list(plans.values())[-1]
    command = _command(args, chosen)
    if args.plot is not None:
        words.write_file(args.plot, plot.draw(plans, frontier))
    if args.json:
        words.print_json(_document(model, sizes, plans, frontier, reserve, command))
        return 0
    console = words.console()
    count = len(model.layers)
    console.print(f"{model.architecture}, {count} layers, weights {model.weights_from}")
    if devices is not None:
        origin = "as given" if args.reserve else "estimated; --reserve changes it"
        console.print(f"{table.size(reserve)} of each device for activations and runtime, {origin}")
    for name, plan in plans.items():
        partition = ",".join(map(str, plan.partition))
        console.print(Text.assemble("\n", (name, "bold"), f": {partition}"))
        console.print(table.splits(plan.ranks, plan.outcomes))
    if len(plans) > 1:
        console.print(_gains(plans))
    if frontier:
        console.print(_frontier(frontier, sizes))
    console.print("\nTo serve it so:")
    for line in command:
        console.print(f"  {line}", soft_wrap=True)
    for line in _in_proportion(args, chosen):
        console.print(line, soft_wrap=True)
    if args.plot is not None:
        console.print(f"\npicture: {args.plot}")
    return 0


def _devices(args: argparse.Namespace, reserve: int) -> list[Device] | None:
    ranks = len(args.pp) if args.pp else args.pp_size
    if args.device_memory is None:
        if args.device_speed is not None:
            raise ConfigError("--device-speed needs --device-memory: balance is paid in tokens")
        return None
    memory = _each(args.device_memory, ranks, "--device-memory")
    speeds = _each(args.device_speed or [1.0], ranks, "--device-speed")
    devices = []
    for rank, (nbytes, speed) in enumerate(zip(memory, speeds, strict=True)):
        budget = int(nbytes * args.gpu_memory_utilization) - reserve
        if budget <= 0:
            raise ConfigError(
                f"rank {rank}: {int(nbytes * args.gpu_memory_utilization):,} bytes of its device "
                f"may be used, and {reserve:,} are for activations and the runtime: give more "
                "--device-memory, or less --reserve"
            )
        devices.append(Device(budget, speed))
    return devices


def _each(values: Sequence[Any], ranks: int, option: str) -> list[Any]:
    if len(values) == 1:
        return list(values) * ranks
    if len(values) != ranks:
        raise ConfigError(f"{option} has {len(values)} values for {ranks} ranks")
    return list(values)


def _candidates(
    args: argparse.Namespace, model: Model, sizes: KvSizes, devices: list[Device] | None
) -> tuple[dict[str, Sequence[int]], list[Partition]]:
    """Partitions by name, with the one to use last; and the frontier, if speeds are given."""
    count = len(model.layers)
    if devices is None:
        if args.pp:
            return {"partition": args.pp}, []
        return {"vLLM's partition": default_partition(count, args.pp_size)}, []
    planner = Planner(model, sizes, devices, args.tp)
    best = planner.best()
    if best is None:
        need = -(-model.weight_bytes(0, count) // args.tp)
        raise ConfigError(
            f"no partition fits: the weights take {need:,} bytes, the devices have "
            f"{sum(device.budget for device in devices):,} for weights and KV"
        )
    found: dict[str, Sequence[int]] = {"best partition": best.layers}
    default = default_partition(count, len(devices))
    if args.pp:
        found = found | {"your partition": args.pp}
    elif _fits(planner, default):
        found = {"vLLM's partition": default} | found
    if not args.device_speed:
        return found, []
    frontier = [each for each in planner.frontier() if each.blocks > sizes.request_blocks()]
    return found, frontier


def _fits(planner: Planner, partition: Sequence[int]) -> bool:
    try:
        return planner.assess(partition).blocks > 0
    except ConfigError:
        return False


def _gains(plans: dict[str, Plan]) -> str:
    best = plans["best partition"].outcomes[-1].tokens
    lines = [""]
    for name, plan in plans.items():
        if name != "best partition":
            tokens = plan.outcomes[-1].tokens
            if not tokens:
                lines.append(f"{name} has no room for a block of KV")
                continue
            lines.append(f"best partition against {name}: {best / tokens:.3f} times the tokens")
    return "\n".join(lines)


def _frontier(frontier: Sequence[Partition], sizes: KvSizes) -> Table:
    found = Table(
        "partition", title="tokens against balance", title_justify="left", box=None, pad_edge=False
    )
    for name in ("tokens", "slowest stage"):
        found.add_column(name, justify="right")
    for each in frontier:
        found.add_row(
            ",".join(map(str, each.layers)), f"{sizes.tokens(each.blocks):,}", f"{each.slowest:.3g}"
        )
    return found


def _command(args: argparse.Namespace, plan: Plan) -> list[str]:
    """The commands to type, with Penstock's server and with vLLM's own."""
    ranks = len(plan.partition)
    options = ["--pipeline-parallel-size", str(ranks)]
    if args.tp > 1:
        options += ["--tensor-parallel-size", str(args.tp)]
    if args.max_model_len:
        options += ["--max-model-len", str(args.max_model_len)]
    options += ["--block-size", str(args.block_size)]
    options += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    if args.device_memory:
        options += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    if args.dtype != "auto":
        options += ["--dtype", args.dtype]
    if args.kv_dtype != "auto":
        options += ["--kv-cache-dtype", args.kv_dtype]
    ours: list[str] = []
    additional: dict[str, Any] = {}
    if args.kv_cache_tokens:
        ours = ["--kv-cache-tokens", str(args.kv_cache_tokens)]
        additional = {"penstock.kv_cache_tokens": args.kv_cache_tokens}
    elif args.kv_cache_memory_bytes:
        options += ["--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
        if args.enable_pp_prop_kv_cache:
            ours = ["--enable-pp-prop-kv-cache"]
            additional = {"penstock.enable_pp_prop_kv_cache": True}
    model = str(args.model if args.model.is_dir() else args.model.parent)
    variable = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, plan.partition))} "
    plain = ["--additional-config", json.dumps(additional)] if additional else []
    return [
        variable + shlex.join(["penstock", "serve", model, *options, *ours]),
        variable + shlex.join(["vllm", "serve", model, *options, *plain]),
    ]


def _total(args: argparse.Namespace, ranks: int) -> int | None:
    """Bytes for KV on all pipeline ranks together."""
    given: int | None = args.kv_cache_memory_bytes
    return given if given is None or args.enable_pp_prop_kv_cache else given * ranks


def _in_proportion(args: argparse.Namespace, plan: Plan) -> list[str]:
    """Lines that tell how to get a proportional split, if the commands ask for vLLM's own split."""
    if args.kv_cache_memory_bytes is None or args.enable_pp_prop_kv_cache:
        return []
    uniform, proportional = plan.outcomes
    totals = {
        proportional.tokens: _total(args, len(plan.partition)),
        uniform.tokens: uniform.split.blocks * sum(plan.block_bytes),
    }
    flag = "--enable-pp-prop-kv-cache --kv-cache-memory-bytes"
    return [
        "\nIn proportion, the flag makes --kv-cache-memory-bytes the total of all ranks:",
        *(f"  {tokens:,} tokens: {flag} {total}" for tokens, total in totals.items()),
    ]


def _document(
    model: Model,
    sizes: KvSizes,
    plans: dict[str, Plan],
    frontier: Sequence[Partition],
    reserve: int,
    command: Sequence[str],
) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "layers": len(model.layers),
        "weights_from": model.weights_from,
        "reserve_bytes": reserve,
        "plans": [
            {
                "name": name,
                "partition": plan.partition,
                "ranks": [
                    {
                        "layers": [start, end],
                        "weight_bytes": plan.weights[rank],
                        "kv_bytes_per_token": plan.token_bytes[rank],
                        "kv_bytes_per_block": plan.block_bytes[rank],
                    }
                    for rank, (start, end) in enumerate(plan.stages)
                ],
                "splits": [
                    asdict(outcome)
                    | {
                        "split": {
                            "blocks": outcome.split.blocks,
                            "kv_memory_bytes": outcome.split.given,
                            "idle_bytes": outcome.split.idle,
                        }
                    }
                    for outcome in plan.outcomes
                ],
            }
            for name, plan in plans.items()
        ],
        "frontier": [
            {
                "partition": each.layers,
                "tokens": sizes.tokens(each.blocks),
                "slowest_stage": each.slowest,
            }
            for each in frontier
        ],
        "commands": list(command),
    }


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers of layers, as 48,16; not {text!r}") from None


def _sizes(text: str) -> list[int]:
    return [words.size_argument(part) for part in text.split(",")]


def _speeds(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < speed < float("inf") for speed in found):
        raise argparse.ArgumentTypeError(f"positive numbers, as 1,1.5; not {text!r}")
    return found


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"a share between 0 and 1, not {text!r}")
    return share
