"""`penstock`: one table of commands, one way to fail.

A command is a module of this package with two functions: ``add_parser(subparsers)`` adds its
parser, ``run(args)`` does the work and returns the exit status: 0 done, 1 failed or cannot
serve, 2 wrong usage. A command whose parser has the default ``passes_options=True`` gets the
options that its parser does not know in ``args.vllm_options``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import penstock
from penstock.errors import ConfigError, PenstockError

COMMANDS = ("serve", "plan", "simulate", "doctor", "pool", "top", "bench", "demo")
"""Modules of this package that are commands, in the order in which help lists them."""

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="KV cache carried between a shared pool and the engines that use it.",
        epilog="`penstock COMMAND --help` tells more. Exit status: 0 done, 1 failed or cannot "
        "serve, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"penstock.cli.{name}")
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
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, WRONG_USAGE)
    except PenstockError as error:
        return _fail(error, FAILED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("penstock"):
            raise
        return _fail(
            f"`penstock {args.command}` needs {error.name}, which vLLM brings: run it beside vLLM, "
            "or install penstock[vllm]",
            FAILED,
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it. Nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return status


def _fail(error: PenstockError | str, status: int) -> int:
    print(f"penstock: {error}", file=sys.stderr)
    return status
