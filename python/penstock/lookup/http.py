"""The service over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from msgspec.json import encode

from penstock._native import TokenIds, read_question
from penstock.errors import Closed, ConfigError
from penstock.lookup.connections import Connections, Patience
from penstock.lookup.measured import Measured
from penstock.lookup.models import Lora, Refused
from penstock.lookup.service import REFRESHER, Found, Limits, Question, Service
from penstock.lookup.tokenizing import Tokenizers

logger = logging.getLogger("penstock.lookup")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ANSWERED = "penstock.answered"
"""In the state of an ASGI scope: what is called when the request has been answered."""

WHOLE = "penstock.whole"
"""In the state of an ASGI scope: what is called when the request's body has been read."""

_INLINE_BYTES = 64 << 10
"""Bodies up to here are read and hashed at once; longer ones would delay other requests."""


class _Failure(Exception):
    """A request that gets no look-up."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class Application:
    """`POST /lookup`, `GET /models`, `GET /metrics`, `GET /health`.

    All but `/health` ask for the token, if there is one. No answer and no log shows it, nor a
    pool's credentials.
    """

    def __init__(
        self,
        service: Service,
        tokenizers: Tokenizers,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        connections: Connections | None = None,
    ) -> None:
        self._service = service
        self._tokenizers = tokenizers
        self._limits = limits or Limits()
        # Digests are of one length, so that the time of a comparison tells nothing.
        self._token = None if token is None else _digest(token.encode())
        self.connections = Connections(Patience()) if connections is None else connections
        """Connections of the server that the application runs in."""
        self._measured = Measured(service)
        self._running = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise ValueError(f"this server speaks HTTP, not {scope['type']}")
        began = time.perf_counter()
        headers: dict[str, str] = {}
        try:
            status, body, kind = await self._serve(scope, receive)
        except _Failure as failure:
            status, headers = failure.status, failure.headers
            body, kind = _json({"error": str(failure)}), b"application/json"
        except Exception:
            logger.exception("a request failed by a fault of this server")
            status, kind = 500, b"application/json"
            body = _json({"error": "a fault of this server; its log has more"})
        if scope["path"] == "/lookup":
            self._measured.note(status, time.perf_counter() - began)
        listed = [(name.encode(), value.encode()) for name, value in headers.items()]
        listed += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        try:
            await send({"type": "http.response.start", "status": status, "headers": listed})
            await send({"type": "http.response.body", "body": body})
        finally:
            if (answered := scope.get("state", {}).get(ANSWERED)) is not None:
                answered()

    def answer_at_once(self, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes | None:
        """The answer to a look-up; None if it is refused, or takes a while."""
        if len(body) > _INLINE_BYTES or self._running >= self._limits.concurrency:
            return None
        began = time.perf_counter()
        try:
            self._check(headers)
            read = read_question(body, self._limits.prompt_tokens)
            if isinstance(read[1], str):
                return None
            found = self._service.find_at_once(self._question(*read))
        except Exception:
            # The long way says what is wrong.
            return None
        if found is None:
            return None
        answer = _json(_answer(found))
        self._measured.note(200, time.perf_counter() - began)
        return answer

    async def _serve(
        self, scope: MutableMapping[str, Any], receive: Receive
    ) -> tuple[int, bytes, bytes]:
        path, method = scope["path"], scope["method"]
        allowed = {"/lookup": "POST", "/models": "GET", "/metrics": "GET", "/health": "GET"}
        if path not in allowed:
            raise _Failure(404, f"nothing is here; there are {', '.join(allowed)}")
        if method != allowed[path]:
            raise _Failure(405, f"{path} takes {allowed[path]}", allow=allowed[path])
        if path == "/health":
            failures = self._service.failures
            failing = [state.name for state in self._service.threads if state.is_failing]
            # If models are not read any more, the service goes blind. If an engine is not followed,
            # only that engine's own cache is not known.
            is_blind = REFRESHER in failing or (failures and not self._service.models)
            is_ok = not is_blind
            # Everybody may ask this. So it names threads, and neither pools nor errors.
            health = {"ok": is_ok} | ({"failing": failing} if failing else {})
            return 200 if is_ok else 503, _json(health), b"application/json"
        self._check(scope["headers"])
        if path == "/metrics":
            return 200, self._measured.text(), b"text/plain; version=0.0.4; charset=utf-8"
        if path == "/models":
            return 200, _json(self._models()), b"application/json"
        if self._running >= self._limits.concurrency:
            raise _Failure(503, "too many look-ups at once; ask again", **{"retry-after": "1"})
        self._running += 1
        try:
            body = await self._body(scope["headers"], receive)
            if (is_whole := scope.get("state", {}).get(WHOLE)) is not None:
                is_whole()
            return 200, _json(_answer(await self._look_up(body))), b"application/json"
        finally:
            self._running -= 1

    def _check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises:
        _Failure: the request does not carry the token.
        """
        if self._token is None:
            return
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        is_right = hmac.compare_digest(_digest(token.strip()), self._token)
        if scheme.lower() != b"bearer" or not is_right:
            message = "give the service's token, as Authorization: Bearer TOKEN"
            raise _Failure(401, message, **{"www-authenticate": "Bearer"})

    async def _body(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_large = _Failure(413, f"a request may have {most} bytes")
        announced = next((value for name, value in headers if name == b"content-length"), b"0")
        # Python refuses to read numbers of thousands of digits.
        if not announced.isdigit() or len(announced) > 18 or int(announced) > most:
            raise too_large
        with _Deadline(self._limits.body_seconds) as deadline:
            try:
                return await _whole(receive, most, too_large)
            except asyncio.CancelledError:
                if not deadline.has_passed:
                    raise
        raise _Failure(408, "the request's body did not come in time")

    async def _look_up(self, body: bytes) -> Found:
        # Short bodies are read and hashed by this thread, long ones would delay others.
        is_long = len(body) > _INLINE_BYTES
        try:
            read = (
                await asyncio.to_thread(read_question, body, self._limits.prompt_tokens)
                if is_long
                else read_question(body, self._limits.prompt_tokens)
            )
            if is_long or isinstance(read[1], str):
                pending = await asyncio.to_thread(
                    lambda: self._service.begin(self._question(*read))
                )
            else:
                pending = self._service.begin(self._question(*read))
        except Refused as error:
            raise _Failure(404 if error.is_unknown else 422, str(error)) from None
        except ConfigError as error:
            raise _Failure(400, str(error)) from None
        except Closed as error:
            raise _Failure(503, str(error)) from None
        if waits_for := pending.waits_for:
            self._measured.note_asked()
            futures = [asyncio.wrap_future(future) for future in waits_for]
            await asyncio.gather(*futures, return_exceptions=True)
        found = pending.found()
        for pool in found.pools:
            if pool.error is not None:
                self._measured.note_failure(pool.url, pool.error)
        if found.pools and all(pool.tokens is None for pool in found.pools):
            kinds = ", ".join(sorted({str(pool.error) for pool in found.pools}))
            raise _Failure(503, f"no pool of this model answers: {kinds}", **{"retry-after": "1"})
        return found

    def _question(
        self,
        model: str,
        prompt: TokenIds | str,
        salt: str | None,
        lora: str | tuple[str, str, str] | None,
        tenant: str | None,
    ) -> Question:
        """Raises:
        ConfigError: the prompt is too long.
        Refused: the model or its tokenizer is not known.
        """
        if isinstance(prompt, str):
            tokens = self._tokenizers.tokens(model, self._service.described(model), prompt)
            if len(tokens) > self._limits.prompt_tokens:
                raise ConfigError(f"a prompt may have {self._limits.prompt_tokens} tokens here")
            return Question(model, tokens, salt, _lora(lora), tenant)
        return Question(model, prompt, salt, _lora(lora), tenant)

    def _models(self) -> dict[str, Any]:
        known = [
            {
                "name": model.name,
                "names": sorted(model.names),
                "namespace": model.namespace.hex(),
                "block_size": model.block_size,
            }
            for model in self._service.models
        ]
        return {"models": known, "refused": self._service.refused}


class _Deadline:
    """Cancels the task that enters it, unless the task leaves it in time. `asyncio.wait_for` would
    read each body in a task of its own, which takes longer than to read it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.has_passed = False

    def __enter__(self) -> _Deadline:
        task = asyncio.current_task()
        assert task is not None
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass, task)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _pass(self, task: asyncio.Task[Any]) -> None:
        self.has_passed = True
        task.cancel()


async def _whole(receive: Receive, most: int, too_large: _Failure) -> bytes:
    """A request's whole body, of at most so many bytes."""
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Failure(400, "the request ended before its body")
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > most:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _json(document: Any) -> bytes:
    return encode(document)


def _lora(asked: str | tuple[str, str, str] | None) -> Lora | str | None:
    return Lora(*asked) if isinstance(asked, tuple) else asked


def _answer(found: Found) -> dict[str, Any]:
    pools = []
    for pool in found.pools:
        shown: dict[str, Any] = {
            "url": pool.url,
            "namespace": pool.namespace,
            "block_size": pool.block_size,
            "tokens": pool.tokens,
        }
        pools.append(shown if pool.error is None else shown | {"error": pool.error})
    answer = {"model": found.model, "prompt_tokens": found.prompt_tokens, "pools": pools}
    # Without engines to follow, nothing is said of any.
    return answer | {"engines": found.engines} if found.engines else answer
