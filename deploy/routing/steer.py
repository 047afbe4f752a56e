"""Steers a router that keeps sessions together, such as vllm-router with `consistent_hash`.

Such a router takes all requests with the same `x-session-id` to the same engine, and knows no
caches. This stands in front of it. For each completion it asks the look-up service what each engine
would find, chooses the best, and gives the request a session that the router takes there. Which
session that is, it learns at its start: it sends a short prompt with each of some sessions, and the
service says which engine has it in its own cache then.

    penstock lookup-server POOL --engine a=tcp://… --engine b=tcp://…
    vllm-router --policy consistent_hash --worker-urls URL URL --port 8001
    python steer.py --lookup http://127.0.0.1:8377 --router http://127.0.0.1:8001 --model NAME

Requests without a prompt of token ids or text, as chats, pass as they are. It needs Python alone.
Start it again when engines come or go: the router's sessions go elsewhere then.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SESSION = "x-session-id"
_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", SESSION}
_TRIES = 64


class NotSteered(Exception):
    """Sessions could not be learnt."""


class Steering:
    """Chooses engines. Any number of threads may ask."""

    def __init__(
        self,
        lookup: str,
        router: str,
        *,
        token: str | None = None,
        timeout: float = 0.05,
        crowding: float = 0.1,
    ) -> None:
        """`timeout` is in seconds: after it, a request goes where the router takes it. A request
        that an engine has more than another weighs as this share of a prompt (`crowding`)."""
        self._lookup, self._router = lookup, router
        self._token, self._timeout, self._crowding = token, timeout, crowding
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self.sessions: dict[str, str] = {}
        """Engine → a session that the router takes to it."""

    def learn(self, model: str, tokens: int = 300) -> None:
        """Finds a session for each engine that the service follows. `tokens` is the length of the
        prompts for that: more than a block.

        Raises:
            NotSteered: an engine gets no session's requests, or its events do not come.
        """
        engines: set[str] = set()
        for number in range(_TRIES):
            session = f"steer-{number}"
            prompt = [random.randrange(5, 200) for _ in range(tokens)]
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            answer = self._post(self._router, "/v1/completions", body, 60.0, {SESSION: session})
            if answer is None:
                raise NotSteered(f"the router at {self._router} does not answer a completion")
            end = time.monotonic() + 10.0
            owner = None
            while owner is None and time.monotonic() < end:
                found = self._ask({"model": model, "prompt": prompt}, timeout=5.0)
                engines = set(found)
                owner = next((name for name, one in found.items() if one["own"]), None)
                time.sleep(0.02)
            if owner is None:
                raise NotSteered("no engine that the look-up service follows has the prompt")
            self.sessions.setdefault(owner, session)
            if engines <= self.sessions.keys():
                return
        missing = ", ".join(sorted(engines - self.sessions.keys()))
        raise NotSteered(f"after {_TRIES} sessions the router took none to {missing}")

    def choose(self, request: Mapping[str, Any]) -> str | None:
        """The engine for a completion; None if the router may choose."""
        prompt = request.get("prompt")
        if not prompt or not isinstance(prompt, (str, list)):
            return None
        asked = {"model": request.get("model"), "prompt": prompt}
        if request.get("cache_salt") is not None:
            asked["cache_salt"] = request["cache_salt"]
        found = self._ask(asked, self._timeout)
        able = [
            name for name in self.sessions if found.get(name, {"state": "gone"})["state"] != "gone"
        ]
        if not able:
            return None
        with self._lock:

            def worth(name: str) -> tuple[float, float, int]:
                one = found[name]
                spared = (one["tokens"] or 0) / one["prompt"]
                # Of equal ones, the one that need not load; then the one that got less so far.
                own = one["own"] or 0
                return spared - self._crowding * self._running[name], own, -self._taken[name]

            best = max(able, key=worth)
            self._running[best] += 1
            self._taken[best] += 1
        return best

    def done(self, engine: str) -> None:
        """A request that was taken to this engine has ended."""
        with self._lock:
            self._running[engine] -= 1

    def _ask(self, asked: Mapping[str, Any], timeout: float) -> dict[str, dict[str, Any]]:
        """Engine → what it would find. Nothing, if the service does not answer in time."""
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        answer = self._post(self._lookup, "/lookup", asked, timeout, headers) or {}
        length = max(1, answer.get("prompt_tokens", 1))
        return {one["name"]: one | {"prompt": length} for one in answer.get("engines", ())}

    @staticmethod
    def _post(
        url: str, path: str, body: Mapping[str, Any], timeout: float, headers: Mapping[str, str]
    ) -> dict[str, Any] | None:
        with suppress(OSError, ValueError, http.client.HTTPException):
            with closing(_connect(url, timeout)) as connection:
                kind = {"Content-Type": "application/json"}
                connection.request(
                    "POST", path, json.dumps(dict(body)).encode(), {**kind, **headers}
                )
                answer = connection.getresponse()
                content = answer.read()
            if answer.status == 200:
                found: dict[str, Any] = json.loads(content)
                return found
        return None


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    where = urllib.parse.urlsplit(url)
    secure = where.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return kind(where.hostname or "", where.port, timeout=timeout)


class Handler(BaseHTTPRequestHandler):
    """Passes requests to the router, completions with a session."""

    protocol_version = "HTTP/1.1"
    steering: Steering
    router: str

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        if "content-length" not in self.headers:
            self.send_error(411)
            return
        body = self.rfile.read(int(self.headers["content-length"]))
        engine = None
        if self.path == "/v1/completions":
            with suppress(ValueError, AttributeError):
                engine = self.steering.choose(json.loads(body))
        try:
            self._pass(body, engine)
        finally:
            if engine is not None:
                self.steering.done(engine)

    def _pass(self, body: bytes | None, engine: str | None = None) -> None:
        kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        if engine is not None:
            kept[SESSION] = self.steering.sessions[engine]
        elif SESSION in self.headers:
            kept[SESSION] = self.headers[SESSION]
        with closing(_connect(self.router, 600.0)) as connection:
            try:
                connection.request(self.command, self.path, body, kept)
                answer = connection.getresponse()
            except OSError as error:
                self.send_error(502, f"the router does not answer: {error}")
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            # Tokens go on as they come.
            while part := answer.read1(65536):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Nothing: prompts and tokens are nobody's business."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lookup", required=True, metavar="URL", help="the look-up service")
    parser.add_argument("--router", required=True, metavar="URL", help="the router")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model that it serves")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    token = os.environ.get("PENSTOCK_LOOKUP_TOKEN")
    Handler.steering = Steering(arguments.lookup, arguments.router, token=token)
    Handler.router = arguments.router
    Handler.steering.learn(arguments.model)
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    print(f"steering at http://{arguments.host}:{server.server_port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
