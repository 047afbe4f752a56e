"""A server that speaks TLS only and lets a user do what an engine needs, and nothing else."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"


def certify(folder: Path) -> None:
    """A certificate for 127.0.0.1 that is its own authority: `cert.pem` and `key.pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pool")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.mark.parametrize("kind", ["valkey", pytest.param("redis", marks=pytest.mark.full)])
def test_tls_and_a_user_with_the_rights_that_the_guide_names(
    kind: str, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    found = re.search(r"ACL SETUSER engine on >PASSWORD (.+)", GUIDE.read_text())
    assert found is not None
    certify(tmp_path)
    files = {"cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    server = Server(
        kind,
        tmp_path,
        *("--tls-cert-file", str(files["cert"])),
        *("--tls-key-file", str(files["key"])),
        *("--tls-auth-clients", "no"),
        *("--tls-port", "0"),
    )
    with server:
        server.command("CONFIG", "SET", "port", "0")
        assert server.command("CONFIG", "SET", "tls-port", str(server.port)) == b"+OK\r\n"
        rights = ["on", ">s3cret", *found.group(1).split()]
        assert server.command("ACL", "SETUSER", "engine", *rights) == b"+OK\r\n"
        assert server.command("ACL", "SETUSER", "default", "-@all", "+acl") == b"+OK\r\n"
        url = f"{kind}s://engine:s3cret@127.0.0.1:{server.port}?ca={files['cert']}"
        prompt = tokens(5 * BLOCK + 3, seed=1301)
        plain.ask(prompt)
        expected = plain.ask(prompt)
        with start(llama, pool=url) as node:
            node.ask(prompt)
            node.wait_for("stored_blocks", 5)
            node.forget()
            answer = node.ask(prompt)
            assert answer.cached == 5 * BLOCK
            assert answer.text == expected.text
            counters = node.counters()
            assert counters["loaded_tokens"] == 5 * BLOCK
            assert counters.get("lookup_failures", 0) == counters.get("stores_failed", 0) == 0
        assert "s3cret" not in node.log.read_text()
        denied = server.command("ACL", "LOG")
        assert denied == b"*0\r\n", denied
