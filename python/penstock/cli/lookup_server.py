"""`penstock lookup-server`: tells routers how many tokens of a prompt a pool has."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import options, words
from penstock.errors import ConfigError
from penstock.lookup.engines import EngineAddress
from penstock.lookup.service import Limits, Service, Settings, open
from penstock.pool import POOL_VARIABLE

if TYPE_CHECKING:
    from argparse import _SubParsersAction

TOKEN_VARIABLE = "PENSTOCK_LOOKUP_TOKEN"

_INTERRUPTED = 130

_HIGHEST_PORT = 65_535


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "lookup-server",
        help="tell routers, over HTTP, how many tokens of a prompt each pool has",
        description="Answers POST /lookup with the number of tokens of a prompt that an engine "
        "would find in each pool. Hashes prompts as the engines do; no engine is asked.",
    )
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="*",
        help=f"the pools, as engines name them (default: ${POOL_VARIABLE})",
    )
    parser.add_argument(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="address to listen on; others than loopback need a token (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        metavar="PORT",
        type=_port,
        default=8377,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"clients must give the token in this file (default: ${TOKEN_VARIABLE} has it, "
        "else no token)",
    )
    parser.add_argument(
        "--no-token", action="store_true", help="let everybody ask who can reach the address"
    )
    parser.add_argument(
        "--tls-certificate", metavar="FILE", help="speak TLS with this chain of certificates, PEM"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's key, PEM")
    options.add(parser, Settings)
    options.add(parser, Limits)
    for name, text in (
        ("alias", "another name of a model: NAME is asked for, VALUE is the engines' name"),
        ("adapter", "a LoRA adapter by name, and the path that engines load it from"),
        ("tokenizer", "a model, and the folder or cached name of its tokenizer, for text"),
    ):
        parser.add_argument(
            f"--{name}", metavar="NAME=VALUE", action="append", default=[], help=text
        )
    parser.add_argument(
        "--engine",
        metavar="NAME=EVENTS[,PART=VALUE]",
        action="append",
        default=[],
        help="an engine whose own cache counts too: the endpoint of its KV events, as "
        "tcp://HOST:PORT. Parts: replay, the endpoint that tells again what was lost; model, if "
        "engines serve several; pool, if they have several",
    )
    parser.add_argument(
        "--json", action="store_true", help="write the address and the models as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal comes."""
    # What the HTTP server needs is not there everywhere.
    from penstock.lookup.http import Application
    from penstock.lookup.server import Address, serve
    from penstock.lookup.tokenizing import Tokenizers

    address = Address(args.host, args.port, _file(args.tls_certificate), _file(args.tls_key))
    if (address.certificate is None) != (address.key is None):
        raise ConfigError("TLS needs both --tls-certificate and --tls-key")
    token = _token(args.token_file)
    if token is None and not address.is_loopback and not args.no_token:
        raise ConfigError(
            f"on {address.host} everybody on the network could ask what the pools hold: give a "
            f"token (--token-file or ${TOKEN_VARIABLE}), or say --no-token"
        )
    if token is not None and args.no_token:
        raise ConfigError("a token is given, and so is --no-token: leave one out")
    urls = [words.named_pool(url) for url in args.urls] or [_default_pool()]
    settings = options.read(Settings, args)
    engines = [EngineAddress.parse(text) for text in args.engine]
    limits = options.read(Limits, args)
    tokenizers = Tokenizers(_pairs("--tokenizer", args.tokenizer))
    adapters, aliases = _pairs("--adapter", args.adapter), _pairs("--alias", args.alias)
    with open(urls, settings, adapters=adapters, aliases=aliases, engines=engines) as service:
        application = Application(service, tokenizers, token=token, limits=limits)
        ended_by = serve(application, address, lambda url: _tell(url, service, args.json))
    return _INTERRUPTED if ended_by is signal.SIGINT else 0


def _tell(url: str, service: Service, as_json: bool) -> None:
    """Writes where the service is, and what it knows."""
    names = sorted({model.name for model in service.models})
    if as_json:
        words.print_json({"url": url, "models": names, "refused": service.refused})
    else:
        console = words.console()
        console.print(words.text(f"Look-ups at {url}/lookup"))
        console.print(words.text(f"models: {', '.join(names) or 'none yet'}"))
        for name, why in service.refused.items():
            console.print(words.text(f"refused: {name}: {why}"))
    # Nothing else may come for long.
    print(end="", flush=True)


def _default_pool() -> str:
    if not (url := os.environ.get(POOL_VARIABLE)):
        raise ConfigError(f"no pool: give its URL, or set {POOL_VARIABLE}")
    return url


def _token(file: str | None) -> str | None:
    """The token that clients must give.

    Raises:
        ConfigError: the file cannot be read, or there is no token in it.
    """
    if file is None:
        given = os.environ.get(TOKEN_VARIABLE)
        source = f"${TOKEN_VARIABLE}"
    else:
        source = f"--token-file {file}"
        try:
            given = Path(file).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise ConfigError(f"{source} cannot be read: {what}; name another file") from None
    if given is None:
        return None
    token = given.strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ConfigError(f"{source} holds no token: write one word of ASCII into it")
    return token


def _file(name: str | None) -> Path | None:
    if name == "":
        raise ConfigError("a file's name is empty: is a variable not set?")
    return None if name is None else Path(name)


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE")
        pairs[name] = value
    return pairs


def _port(text: str) -> int:
    """A port on the command line; 0 stands for any."""
    if not text.isascii() or not text.isdigit() or int(text) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}; 0 to {_HIGHEST_PORT}")
    return int(text)
