"""The demo's requests: conversations about long documents, or an agent's recorded requests.

Every step names the node that it goes to. A conversation changes nodes with each of its steps, as
with a router that looks only at load.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.models.chat import ASSISTANT, BEGIN, USER, encode
from penstock.errors import ConfigError

NODES = 2

_DOCUMENT_TOKENS = 2_000
_ANSWER_TOKENS = 24
_TURNS = 3
_MODULES = (
    "argparse",
    "typing",
    "subprocess",
    "tarfile",
    "inspect",
    "datetime",
    "ast",
    "zipfile",
    "doctest",
    "pathlib",
    "locale",
    "turtle",
    "tokenize",
    "threading",
    "mailbox",
    "smtplib",
)
_QUESTIONS = (
    "What is this module for, in a sentence?",
    "Which of its functions would you call first, and with what?",
    "What happens when an argument is wrong?",
)

_TRACE_PROMPT_TOKENS = 8_192
_TRACE_TOTAL_TOKENS = 60_000
_TRACE_REQUESTS = 64
_TRACE_SESSION_REQUESTS = 6
_TRACE_PAUSE = 1.0


@dataclass(frozen=True)
class Step:
    """One request, to one node."""

    conversation: int
    turn: int
    node: int
    tokens: tuple[int, ...]
    """The prompt; if `follows`, only its part after the conversation's last prompt and answer."""
    follows: bool
    """Whether `tokens` continue the conversation's last step."""
    answer_tokens: int = _ANSWER_TOKENS
    pause: float = 0.0
    """Seconds between the last step's answer and this step."""


@dataclass(frozen=True)
class Workload:
    """Steps in the order in which they are sent."""

    title: str
    steps: tuple[Step, ...]
    cuts: tuple[str, ...] = ()
    """The parts of the material that were left out to fit the model and the time, in words."""


def documents(conversations: int) -> Workload:
    """Conversations about sources of Python's standard library, with one module for each.

    All first turns come before all second turns, because people read an answer before they go on.

    Raises:
        ConfigError: there are fewer modules than conversations.
    """
    texts = list(_documents())
    if not 1 <= conversations <= len(texts):
        raise ConfigError(f"--conversations: 1 to {len(texts)}, not {conversations}")
    steps = []
    for turn in range(_TURNS):
        for conversation in range(conversations):
            question = encode(_QUESTIONS[turn % len(_QUESTIONS)])
            tokens = [USER, *question, ASSISTANT]
            if turn == 0:
                document = encode(f"{texts[conversation]}\n\n")
                tokens = [BEGIN, USER, *document, *question, ASSISTANT]
            steps.append(
                Step(conversation, turn, (conversation + turn) % NODES, tuple(tokens), turn > 0)
            )
    return Workload(
        f"{conversations} conversations of {_TURNS} turns about sources of the standard library",
        tuple(steps),
    )


def _documents() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        path = folder / f"{module}.py"
        if not path.exists():
            path = folder / module / "__init__.py"
        if path.exists():
            source = path.read_bytes()[:_DOCUMENT_TOKENS]
            # Cut at a line's end, so that no character is cut in two.
            yield source[: source.rfind(b"\n")].decode(errors="replace")


def trace(path: Path) -> Workload:
    """An agent's requests from a file of JSON lines, plain or gzipped.

    Each line has the fields `timestamp` (microseconds), `input`, `output` (texts) and `session_id`.
    Requests are in the order of their timestamps. Pauses between them are cut to a second.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    sessions = _sessions(path)
    chosen: list[tuple[int, Step]] = []
    total = shortened = 0
    for conversation, session in enumerate(sessions.values()):
        session.sort(key=lambda entry: entry[0])
        turn = 0
        seen: set[tuple[int, ...]] = set()
        for timestamp, prompt, answer in session[:_TRACE_SESSION_REQUESTS]:
            tokens = (BEGIN, *encode(prompt))
            cut = tokens[:_TRACE_PROMPT_TOKENS]
            # Two prompts cut to the same beginning are equal. The second one would show nothing.
            if cut != tokens and cut in seen:
                continue
            full = len(chosen) == _TRACE_REQUESTS or total + len(cut) > _TRACE_TOTAL_TOKENS
            if chosen and full:
                break
            seen.add(cut)
            shortened += cut != tokens
            total += len(cut)
            answer_tokens = max(1, min(_ANSWER_TOKENS, len(encode(answer))))
            node = (conversation + turn) % NODES
            chosen.append((timestamp, Step(conversation, turn, node, cut, False, answer_tokens)))
            turn += 1
    chosen.sort(key=lambda item: item[0])
    moments = [moment for moment, _ in chosen]
    pauses = [0.0, *((b - a) / 1e6 for a, b in itertools.pairwise(moments))]
    steps = tuple(
        replace(step, pause=min(pause, _TRACE_PAUSE))
        for (_, step), pause in zip(chosen, pauses, strict=True)
    )

    requests = sum(len(session) for session in sessions.values())
    cuts = []
    if len(steps) < requests:
        cuts.append(
            f"{len(steps)} of {requests} requests are replayed: at most {_TRACE_SESSION_REQUESTS} "
            f"of a session, {_TRACE_REQUESTS} and {_TRACE_TOTAL_TOKENS:,} prompt tokens in all"
        )
    if shortened:
        cuts.append(f"{shortened} prompts are cut to their first {_TRACE_PROMPT_TOKENS:,} tokens")
    if max(pauses) > _TRACE_PAUSE:
        cuts.append(f"pauses between requests are cut to {_TRACE_PAUSE:g} s")
    cuts.append(f"answers have at most {_ANSWER_TOKENS} tokens")
    return Workload(f"requests of {path.name}", steps, tuple(cuts))


def _sessions(path: Path) -> dict[str, list[tuple[int, str, str]]]:
    """Session → time, prompt and answer of its requests, in the order of the file."""
    sessions: dict[str, list[tuple[int, str, str]]] = {}
    for number, record in _records(path):
        try:
            entry = (int(record["timestamp"]), str(record["input"]), str(record["output"]))
            sessions.setdefault(str(record["session_id"]), []).append(entry)
        except KeyError as error:
            raise ConfigError(f"{path}, line {number}: a request needs {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a request: {error}") from None
    if not sessions:
        raise ConfigError(f"{path} holds no requests")
    return sessions


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}, line {number}: not a JSON object")
            yield number, record
