"""A real image registry on loopback, with each kind of login, and a base image made for it."""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests

from tests.http_thread import answer_in_thread

USER, PASSWORD = "carol", "correct horse"
SERVER = "docker-registry"
DOCKER = {
    "manifest": "application/vnd.docker.distribution.manifest.v2+json",
    "config": "application/vnd.docker.container.image.v1+json",
    "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
OCI = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar+gzip",
}
INDEX = "application/vnd.oci.image.index.v1+json"


def missing_tools(*names: str) -> str | None:
    """Why a test cannot run here; None when it can."""
    missing = [name for name in names if shutil.which(name) is None]
    return f"apt-get install {' '.join(missing)}" if missing else None


@dataclass
class Registry:
    """One running registry."""

    address: str
    scopes: list[str] = field(default_factory=list)
    """Of every token that was asked for."""

    def session(self) -> requests.Session:
        """A client that is logged in, where it needs to be only ``put`` uses it."""
        session = requests.Session()
        session.trust_env = False
        return session


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(folder: Path, kind: str = "open") -> Iterator[Registry]:
    """A registry of one kind: ``open``, ``basic`` or ``token``."""
    port, folder = free_port(), folder / kind
    folder.mkdir(parents=True)
    registry = Registry(f"127.0.0.1:{port}")
    lines = [
        "version: 0.1",
        "log: {level: error}",
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}, delete: {{enabled: true}}}}",
        f"http: {{addr: '127.0.0.1:{port}'}}",
    ]
    tokens: ThreadingHTTPServer | None = None
    if kind == "basic":
        import bcrypt

        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(5)).decode()
        (folder / "htpasswd").write_text(f"{USER}:{hashed}\n")
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}")
    if kind == "token":
        tokens = token_server(folder, registry)
        realm = f"http://127.0.0.1:{tokens.server_port}/token"
        lines.append(
            f"auth: {{token: {{realm: '{realm}', service: reg, issuer: iss, "
            f"rootcertbundle: {folder / 'cert.pem'}}}}}"
        )
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [SERVER, "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, "the registry did not come up"
                time.sleep(0.05)
        yield registry
    finally:
        server.terminate()
        server.wait(10)
        if tokens is not None:
            tokens.shutdown()
            tokens.server_close()


def login(folder: Path, address: str, password: str = PASSWORD) -> dict[str, str]:
    """A docker config that knows the registry; the environment that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
    return {"DOCKER_CONFIG": str(folder)}


def token_server(folder: Path, registry: Registry) -> ThreadingHTTPServer:
    """Gives the scopes that are asked for to whoever knows the password, and to nobody else."""
    import jwt
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "iss")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    der = base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()
    expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Tokens(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            if self.headers.get("Authorization") != expected:
                self.send_response(401)
                self.end_headers()
                return
            scopes = [part for text in asked.get("scope", []) for part in text.split()]
            access = []
            for scope in scopes:
                kind, where, actions = scope.split(":")
                # The registry names actions in an order that differs from one time to another.
                named = ",".join(sorted(actions.split(",")))
                registry.scopes.append(f"{kind}:{where}:{named}")
                access.append({"type": kind, "name": where, "actions": actions.split(",")})
            at = int(time.time())
            claims = {
                "iss": "iss", "sub": USER, "aud": "reg", "exp": at + 300, "nbf": at - 10,
                "iat": at, "jti": str(at), "access": access,
            }  # fmt: skip
            token = jwt.encode(claims, key, algorithm="RS256", headers={"x5c": [der]})
            body = json.dumps({"token": token}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    answer_in_thread(server)
    return server


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def put_base(
    address: str,
    repository: str,
    *,
    types: dict[str, str] = OCI,
    as_index: bool = False,
    environ: dict[str, str] | None = None,
) -> str:
    """Upload a base image (a shell and nothing else); returns its digest."""
    from runtime.launch.image.reference import ImageReference
    from runtime.launch.image.registry import Repository

    store = Repository(
        ImageReference(registry=address, repository=repository), environ=environ or {}
    )
    layer = _layer()
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": "2020-01-01T00:00:00Z",
            "config": {"Env": ["PATH=/bin"], "Labels": {"vendor": "test"}},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer)]},
            "history": [{"created": "2020-01-01T00:00:00Z", "created_by": "test"}],
        }
    )
    packed = gzip.compress(layer, mtime=0)
    for blob in (packed, config):
        if not store.has_blob(sha256(blob)):
            store.upload(sha256(blob), blob, len(blob))
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": types["manifest"],
            "config": _descriptor(types["config"], config),
            "layers": [_descriptor(types["layer"], packed)],
        }
    )
    store.put_manifest(sha256(manifest), manifest, types["manifest"])
    if not as_index:
        store.put_manifest("latest", manifest, types["manifest"])
        return sha256(manifest)
    described = _descriptor(types["manifest"], manifest)
    platform = {"os": "linux", "architecture": "amd64"}
    index = _json(
        {"schemaVersion": 2, "mediaType": INDEX, "manifests": [{**described, "platform": platform}]}
    )
    store.put_manifest(sha256(index), index, INDEX)
    return sha256(index)


def _layer() -> bytes:
    shell = shutil.which("busybox")
    assert shell is not None
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("bin")
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
        content = Path(shell).read_bytes()
        info = tarfile.TarInfo("bin/busybox")
        info.size, info.mode = len(content), 0o755
        tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("bin/sh")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(link)
    return data.getvalue()


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode()


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": sha256(content), "size": len(content)}
