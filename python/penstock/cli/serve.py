"""`penstock serve`: vLLM's server with Penstock in it.

It composes a `vllm serve` command and replaces itself by it. So signals and the exit status are
vLLM's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from penstock._native import Store
from penstock.cli import options, words
from penstock.errors import ConfigError
from penstock.plan.wish import PROPORTIONAL, TOKENS
from penstock.pool import POOL_VARIABLE, is_registered
from penstock.programs import cache_folder, vllm_program
from penstock.vllm.names import PREFIX
from penstock.vllm.roles import BOTH, ROLES
from penstock.vllm.settings import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction


@dataclass(frozen=True)
class Launch:
    """A `vllm serve` command, and the variables to add to its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    shown: str
    """The whole command line as a user would type it into a shell, with secrets masked."""


def compose(
    model: str,
    settings: Mapping[str, Any],
    options: Sequence[str] = (),
    *,
    role: str = BOTH,
    proportional: bool = False,
    kv_tokens: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """The `vllm serve` command for `model` over a pool.

    Args:
        settings: the connector's, by their names in `Settings`. The pool's URL is among them.
        options: vLLM's options. They go to vLLM as they are.
        role: whether this server stores, loads, or does both (`kv_role`, without the `kv_`).
        proportional: whether to split KV memory over pipeline ranks by their needs.
        kv_tokens: sets KV memory to the bytes that this number of tokens takes.

    Raises:
        ConfigError: a setting is wrong, or an option is at odds with Penstock.
        StoreError: the pool's directory cannot be used, or the keys cannot be read.
    """
    # Imported here, because it needs packages that vLLM installs, and other commands do not.
    from penstock.vllm.host import open_node_memory

    pool = settings["pool"]
    # Opening does not connect yet. A server that is down must not keep vLLM from starting.
    store = Store.open(pool)
    if not store.capabilities()["shared"]:
        raise ConfigError(
            f"{store.url} is private to a process: vLLM's processes cannot share it; name a "
            "directory, shared memory or a server"
        )
    _check_options(options, environ)
    # Every worker reads the keys, but minutes later. Report errors in them now.
    key_file = settings.get("encryption_key_file")
    words.encryption_keys(key_file)

    extra = {PREFIX + name: value for name, value in settings.items()}
    if key_file is not None:
        extra[PREFIX + "encryption_key_file"] = str(Path(key_file).absolute())
    # Every user of the machine can read a command line (ps), but not an environment.
    environment = {POOL_VARIABLE: extra.pop(PREFIX + "pool")} if _has_secret(pool) else {}
    open_node_memory(Settings.parse(extra, environment).host_memory, "penstock-serve")
    transfer = {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm.connector",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    additional = _additional_config(options, proportional=proportional, kv_tokens=kv_tokens)
    arguments = ["vllm", "serve", model, *_with_additional(options, additional)]
    if not any(name.endswith("enable-prompt-tokens-details") for name, _ in _named(options)):
        arguments.append("--enable-prompt-tokens-details")
    arguments += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    masked = "".join(f"{name}={shlex.quote(store.url)} " for name in environment)
    return Launch(tuple(arguments), environment, masked + shlex.join(arguments))


def _additional_config(
    options: Sequence[str], *, proportional: bool, kv_tokens: int | None
) -> dict[str, Any]:
    """The plugin's settings for the split of KV memory."""
    if proportional and kv_tokens is None:
        _check_proportional(options)
    asked = {PROPORTIONAL: proportional or None, TOKENS: kv_tokens}
    return {name: value for name, value in asked.items() if value is not None}


def _has_secret(pool: str) -> bool:
    tiers = pool.split()
    urls = [urlsplit(tier) for tier in tiers]
    # Nobody knows where others have their secrets.
    return any(map(is_registered, tiers)) or any(
        "@" in url.netloc or any("password" in name for name in parse_qs(url.query)) for url in urls
    )


def _named(options: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The long options by their names as vLLM reads them, each with its value or the next word."""
    for option, following in zip_longest(options, options[1:]):
        if option.startswith("--"):
            name, equals, value = option[2:].partition("=")
            yield name.replace("_", "-"), value if equals else following


def _check_options(options: Sequence[str], environ: Mapping[str, str]) -> None:
    for name, value in _named(options):
        if name.partition(".")[0] == "kv-transfer-config":
            raise ConfigError(
                "--kv-transfer-config is what `penstock serve` composes; leave it out, or run "
                "`vllm serve` yourself with the configuration that --dry-run prints"
            )
        if name == "no-enable-prefix-caching":
            raise ConfigError(
                "--no-enable-prefix-caching leaves blocks without the hashes that Penstock finds "
                "them by; leave it out"
            )
        if name == "prefix-caching-hash-algo" and str(value).startswith("xxhash"):
            seed = environ.get("PYTHONHASHSEED", "")
            if not seed.isdigit():
                raise ConfigError(
                    f"--prefix-caching-hash-algo {value} starts from a random seed, so no other "
                    "server would find this one's blocks: use sha256, or set PYTHONHASHSEED to "
                    "the same number on all servers"
                )


def _check_proportional(options: Sequence[str]) -> None:
    """Refuses a proportional split without a total, before a model is loaded for nothing."""
    # An option may also be in a configuration file. Then the engine core checks it.
    if not {"kv-cache-memory-bytes", "config"} & dict(_named(options)).keys():
        raise ConfigError(
            "--enable-pp-prop-kv-cache requires --kv-cache-memory-bytes, the bytes that all "
            "pipeline ranks get together, or --kv-cache-tokens"
        )


def _with_additional(options: Sequence[str], additional: Mapping[str, Any]) -> list[str]:
    """vLLM's options, with these keys added to the operator's additional configuration."""
    if not additional:
        return list(options)
    kept: list[str] = []
    given: Any = {}
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if name.replace("_", "-") != "--additional-config":
            kept.append(option)
            continue
        try:
            given = json.loads(value if equals else next(rest, ""))
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ConfigError("--additional-config is not a JSON object, as '{\"name\": 1}'")
    merged = json.dumps({**given, **additional}, separators=(",", ":"))
    return [*kept, "--additional-config", merged]


def default_pool() -> str:
    """The pool that needs no server: a directory in the user's cache directory."""
    return (cache_folder() / "pool").as_uri()


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser. Options that it does not know are vLLM's. The caller
    puts them into the namespace's `vllm_options`."""
    parser = subparsers.add_parser(
        "serve",
        usage="%(prog)s MODEL [OPTION ...] [VLLM OPTION ...]",
        help="run vLLM's server over a pool",
        description="Runs `vllm serve` with Penstock as its KV connector, and prints the command. "
        "Every option that is not named here goes to vLLM.",
    )
    parser.add_argument("model", metavar="MODEL", help="model, as for `vllm serve`")
    options.add(parser, Settings)
    parser.add_argument(
        "--role",
        metavar="ROLE",
        default=BOTH,
        choices=[name.removeprefix("kv_") for name in ROLES],
        help="both; or, where one server computes prompts and another goes on with them: producer "
        "for the former, which stores and never loads, consumer for the latter, which loads and "
        "does not store (default: %(default)s)",
    )
    parser.add_argument(
        "--enable-pp-prop-kv-cache",
        action="store_true",
        help="split --kv-cache-memory-bytes over the pipeline ranks in proportion to what their "
        "layers need. `penstock plan` shows what that holds",
    )
    parser.add_argument(
        "--kv-cache-tokens",
        metavar="N",
        type=words.count_argument,
        help="keep KV for N tokens: exactly the memory that they need on every rank",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="another setting of the connector, as --set load_timeout=0.2; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the command, do not run it"
    )
    parser.set_defaults(passes_options=True)


def run(args: argparse.Namespace) -> int:
    """Replaces this process by vLLM's server. Returns only with --dry-run."""
    launch = compose(
        args.model,
        _settings(args),
        args.vllm_options,
        role=args.role,
        proportional=args.enable_pp_prop_kv_cache,
        kv_tokens=args.kv_cache_tokens,
    )
    print(launch.shown, flush=True)
    if not args.dry_run:
        os.execve(vllm_program(), launch.arguments, {**os.environ, **launch.environment})
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the connector's settings, by their names."""
    given = options.given(Settings, args)
    pool = given.pop("pool", os.environ.get(POOL_VARIABLE) or default_pool())
    found = {"pool": words.named_pool(pool)} | given
    own = options.names(Settings)
    for text in args.settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, not {text!r}")
        name = name.removeprefix(PREFIX)
        if name in own:
            raise ConfigError(f"{name} has an option of its own: {own[name]}")
        found[name] = value
    return found
