"""`penstock pool warm`: has a vLLM server compute prompts ahead, so that its pool holds them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import words
from penstock.cli.activity import address, read
from penstock.cli.prompts import Prompt, read_prompts
from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.pool.pace import Pace
from penstock.printable import printable
from penstock.vllm.names import TENANT

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from penstock.completions import Answer, Completions

_METRICS_SECONDS = 10.0
_STORED = "vllm:penstock_stored_blocks_total"
_LOST = ("vllm:penstock_stores_dropped_total", "vllm:penstock_stores_failed_total")
_POLL_SECONDS = 0.5
_QUIET_SECONDS = 2.0
"""After so long without a change, no more stores are expected."""
_SETTLE_SECONDS = 30.0
_SHOWN_REFUSALS = 3


@dataclass
class Warmed:
    """What was sent, and what came of it."""

    prompts: int
    """Different prompts in the file."""
    answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server had in its own cache, or in the pool."""
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    """The first refusals, in the server's words."""
    stored_blocks: int = 0
    """Blocks stored in the meantime, by the server's metrics; also those of other requests."""
    stores_lost: int = 0
    """Objects dropped or failed in the meantime, by the server's metrics."""
    seconds: float = 0.0


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the action to `penstock pool`'s parser."""
    parser = actions.add_parser(
        "warm",
        help="have a vLLM server compute prompts ahead, so that its pool holds them",
        description="Sends each prompt of a file to a vLLM server, for one token. The server "
        "stores the KV in its pool. It computes only what neither itself nor the pool has. "
        "Exit status: 1 if the server refused prompts, or could not store blocks.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="JSON Lines: each a text, a list of token ids, or an object with one of both as "
        "prompt, and perhaps model, cache_salt and tenant",
    )
    parser.add_argument("engine", metavar="ENGINE", help="host:port of a vLLM server, or its URL")
    parser.add_argument(
        "--model", metavar="NAME", default="", help="model or adapter (default: the server's model)"
    )
    words.add_counts(parser, ("concurrency", 4, "requests under way at once"))
    parser.add_argument(
        "--rate",
        metavar="TOKENS/s",
        type=words.tokens_argument,
        help="have at most so many tokens computed in a second; tokens that the server has cached "
        "do not count (default: no bound)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=120.0,
        help="longest wait for an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say how many prompts and tokens there are, and send none; the server counts the "
        "tokens of texts",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    parser.set_defaults(run_action=run)


def run(args: argparse.Namespace) -> int:
    """Warms the pool of a server."""
    # vLLM brings OpenAI's client. What needs no server does without.
    from penstock.completions import Completions

    metrics = address(args.engine)
    server = Completions(
        metrics.removesuffix("/metrics"),
        api_key=os.environ.get("OPENAI_API_KEY") or "none",
        timeout=args.timeout,
    )
    if args.file.exists() and not args.file.is_file():
        raise ConfigError(f"{args.file} is read twice: give a regular file")
    # A first pass, so that nothing is sent if a line is wrong.
    total = sum(1 for _ in read_prompts(args.file))
    if args.dry_run:
        return _count(server, total, args)
    before = _metrics(metrics)
    warmed = Warmed(total)
    last: Prompt | None = None
    begin = time.monotonic()
    with words.progress(args.json) as progress:
        task = progress.add_task("warming", total=total)
        for prompt, outcome in _answers(server, args):
            if isinstance(outcome, PenstockError):
                warmed.refused += 1
                if len(warmed.refusals) < _SHOWN_REFUSALS:
                    warmed.refusals.append(str(outcome))
            else:
                last = prompt
                warmed.answered += 1
                warmed.prompt_tokens += outcome.prompt_tokens
                warmed.cached_tokens += outcome.cached_tokens
            progress.advance(task)
    warmed.seconds = time.monotonic() - begin
    after = _settled(metrics, lambda: None if last is None else _ask(server, last, args))
    warmed.stored_blocks = int(after[_STORED] - before[_STORED])
    warmed.stores_lost = int(sum(after.get(name, 0) - before.get(name, 0) for name in _LOST))
    _report(warmed, args.json)
    return 1 if warmed.refused or warmed.stores_lost else 0


def _count(server: Completions, total: int, args: argparse.Namespace) -> int:
    tokens = 0
    with words.progress(args.json) as progress:
        task = progress.add_task("counting", total=total)
        for prompt in read_prompts(args.file):
            if isinstance(prompt.content, str):
                model = prompt.model or args.model
                tokens += server.count_tokens(prompt.content, model=model)
            else:
                tokens += len(prompt.content)
            progress.advance(task)
    if args.json:
        words.print_json({"prompts": total, "prompt_tokens": tokens})
    else:
        words.console().print(f"{total:,} prompts, {tokens:,} tokens. None was sent.")
    return 0


def _ask(server: Completions, prompt: Prompt, args: argparse.Namespace) -> Answer:
    model = prompt.model or args.model
    return server.complete(
        prompt.content,
        1,
        model=model,
        cache_salt=prompt.cache_salt,
        kv_transfer_params={TENANT: prompt.tenant} if prompt.tenant else None,
    )


def _answers(
    server: Completions, args: argparse.Namespace
) -> Iterator[tuple[Prompt, Answer | PenstockError]]:
    """The prompts with the server's answers and refusals, as they come.

    Raises:
        BrokenOff: the server does not answer.
    """
    from penstock.completions import BrokenOff, Refused

    pace = Pace(args.rate)

    def ask(prompt: Prompt) -> tuple[Prompt, Answer | PenstockError]:
        try:
            answer = _ask(server, prompt, args)
        except Refused as error:
            return prompt, error
        except BrokenOff as error:
            raise BrokenOff(f"the server at {server.url} {error}") from error
        pace.spend(answer.prompt_tokens - answer.cached_tokens)
        return prompt, answer

    with ThreadPoolExecutor(args.concurrency) as threads:
        under_way: set[Future[tuple[Prompt, Answer | PenstockError]]] = set()
        for prompt in read_prompts(args.file):
            if len(under_way) == args.concurrency:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
            under_way.add(threads.submit(ask, prompt))
        yield from (each.result() for each in under_way)


def _metrics(url: str) -> Mapping[str, float]:
    try:
        values = read(url, _METRICS_SECONDS).values
    except OSError as error:
        raise Unreachable(f"no metrics at {url}: {error}") from error
    if _STORED not in values:
        raise ConfigError(
            f"the server at {url} has no pool: its metrics have no {_STORED}; start it with "
            "`penstock serve`"
        )
    return values


def _settled(url: str, nudge: Callable[[], object]) -> Mapping[str, float]:
    """The server's metrics once no more blocks are stored. `nudge` sends a cheap request: vLLM
    counts with its steps, and without requests it takes none."""
    give_up = time.monotonic() + _SETTLE_SECONDS
    values = _metrics(url)
    changed = time.monotonic()
    while changed + _QUIET_SECONDS > time.monotonic() < give_up:
        time.sleep(_POLL_SECONDS)
        with suppress(PenstockError):
            nudge()
            now = _metrics(url)
            if any(now.get(name) != values.get(name) for name in (_STORED, *_LOST)):
                changed = time.monotonic()
            values = now
    return values


def _report(warmed: Warmed, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = asdict(warmed)
        words.print_json(document)
        return
    for refusal in warmed.refusals:
        print(printable(f"The server {refusal}"), file=sys.stderr)
    computed = warmed.prompt_tokens - warmed.cached_tokens
    console = words.console()
    console.print(
        f"{warmed.answered:,} of {warmed.prompts:,} prompts in {warmed.seconds:.1f} s: "
        f"{computed:,} tokens computed, {warmed.cached_tokens:,} were cached."
    )
    console.print(
        f"In the meantime the server stored {warmed.stored_blocks:,} blocks and lost "
        f"{warmed.stores_lost:,} objects on the way."
    )
