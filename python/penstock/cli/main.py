"""`penstock`: one table of commands, one way to fail.

A command is a module of this package with two functions: ``add_parser(subparsers)`` adds its
parser, ``run(args)`` does the work and returns the exit status (`STATUSES`). A command whose parser
has the default ``passes_options=True`` gets the options that its parser does not know in
``args.vllm_options``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import penstock
from penstock.errors import ConfigError, Denied, PenstockError, TimedOut, Unreachable
from penstock.printable import printable

COMMANDS = ("serve", "plan", "simulate", "doctor", "pool", "lookup-server", "top", "bench")
"""The commands, in the order in which help lists them. Each is a module of this package, whose name
has underscores for dashes."""

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

STATUSES: Mapping[int, str] = {
    OK: "done",
    FAILED: "the command ran, and failed or found something wrong: a pool that does not answer or "
    "refuses, one that cannot serve, outputs that differ; or a question answered with no",
    WRONG_USAGE: "the call is wrong, or a setting or a file that it names: the same call fails "
    "again until that is changed",
    INTERRUPTED: "ended by Ctrl-C",
}
"""What exit statuses mean, for all commands. `serve` becomes `vllm serve`, whose status counts."""

_EXTRAS: Mapping[str, str] = {"lookup-server": "lookup"}
"""Which extra has what a command needs, where that is not `vllm`."""

_NEXT_STEPS: Mapping[type[PenstockError], str] = {
    Unreachable: "check that the server runs and that the pool's URL names it",
    Denied: "give credentials that may do this, as valkey://user:password@host; those of an object "
    "store come from the environment; a directory needs a user who may use it",
    TimedOut: "find out what holds the pool up, or allow more time",
}
"""What to do next, where an error of a store does not say."""


class Parser(argparse.ArgumentParser):
    """A parser that knows options by their full names only, and whose errors take one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(WRONG_USAGE, f"{self.prog}: {message}; `{self.prog} --help` tells more\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="penstock",
        description="KV cache carried between a shared pool and the engines that use it.",
        epilog="`penstock COMMAND --help` tells more. Exit status: 0 done; 1 failed, or found "
        "something wrong; 2 wrong call or configuration.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"penstock.cli.{name.replace('-', '_')}")
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if getattr(args, "passes_options", False):
        args.vllm_options = unknown
    elif unknown:
        _chosen(parser, args).error(f"unknown arguments: {' '.join(unknown)}")
    try:
        return status_of(lambda: int(args.run(args)))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("penstock"):
            raise
        return _fail(
            f"`penstock {args.command}` needs {error.name}, which vLLM brings: run it beside vLLM, "
            f"or install penstock[{_EXTRAS.get(args.command, 'vllm')}]",
            FAILED,
        )


def status_of(run: Callable[[], int]) -> int:
    """The exit status of a program that `run` is the work of. An error takes one line."""
    try:
        status = run()
        sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, WRONG_USAGE)
    except PenstockError as error:
        next_step = _NEXT_STEPS.get(type(error))
        return _fail(f"{error}: {next_step}" if next_step else error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it. Nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return status


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command that was called, or of its action."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _chosen(action.choices[getattr(args, action.dest)], args)
    return parser


def _fail(error: PenstockError | str, status: int) -> int:
    # A server's own words may be in it.
    said = printable(str(error))
    print(f"penstock: {said}", file=sys.stderr)
    return status
