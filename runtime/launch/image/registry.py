"""One repository of an image registry, over its HTTP API.

``oras`` brings names, sessions and credentials (docker config, helpers, token requests). Requests
are sent here: its own retry waits minutes on a wrong password, sends a token whose scope is too
small again, and sends the body of an upload before it knows whether it may.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import oras.auth
import oras.auth.utils
import oras.client
import oras.container
import requests

from runtime.errors import ConfigError, CredentialsRefused, ServiceUnavailable
from runtime.launch.image.reference import ImageReference

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CONNECT_S = 10.0
_READ_S = 120.0
_CHUNK_BYTES = 4 * 2**20


class Repository:
    """Manifests and blobs of one repository. Every call has a deadline; none retries by itself.

    Raises (every call):
        ServiceUnavailable: if the registry did not answer, or answered 429 or 5xx.
        CredentialsRefused: if it wants credentials that we do not have.
    """

    def __init__(self, image: ImageReference, *, environ: Mapping[str, str] = os.environ) -> None:
        """Prepare; nothing is sent.

        Args:
            image: any reference into the repository.
            environ: ``DOCKER_CONFIG`` names the folder of the docker config.
        """
        self.image = image
        self._base = f"{'http' if image.is_loopback else 'https'}://{image.registry}"
        self._environ = environ
        self._client: Any = None
        self._authorization: str | None = None

    # -- manifests ------------------------------------------------------------------------------

    def manifest(self, name: str) -> tuple[bytes, str] | None:
        """Content and digest of a manifest or index; None if there is none of that name.

        Raises:
            ConfigError: if the content is not what its digest says.
        """
        accept = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
        answer = self._send("GET", f"manifests/{name}", headers={"Accept": accept}, may_miss=True)
        if answer.status_code == 404:
            return None
        digest = digest_of(answer.content)
        if name.startswith("sha256:") and name != digest:
            raise ConfigError(f"{self.image.registry} answered {digest} for {name}")
        return answer.content, digest

    def has_manifest(self, name: str) -> bool:
        """There is a manifest of that tag or digest."""
        accept = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
        answer = self._send("HEAD", f"manifests/{name}", headers={"Accept": accept}, may_miss=True)
        return answer.status_code != 404

    def put_manifest(self, name: str, content: bytes, media_type: str) -> None:
        """Store a manifest under a tag or its digest, byte for byte."""
        self._send("PUT", f"manifests/{name}", data=content, headers={"Content-Type": media_type})

    # -- blobs ----------------------------------------------------------------------------------

    def blob(self, digest: str) -> bytes:
        """A small blob, such as a config.

        Raises:
            ConfigError: if there is none, or it is damaged.
        """
        answer = self._send("GET", f"blobs/{digest}", may_miss=True)
        if answer.status_code == 404 or digest_of(answer.content) != digest:
            raise ConfigError(f"{self.image.at(digest)}: the blob is missing or damaged")
        return answer.content

    def has_blob(self, digest: str) -> bool:
        """The repository has the blob."""
        return self._send("HEAD", f"blobs/{digest}", may_miss=True).status_code != 404

    def stream(self, digest: str) -> Iterable[bytes]:
        """A large blob, in chunks."""
        answer = self._send("GET", f"blobs/{digest}", stream=True)
        return answer.iter_content(_CHUNK_BYTES)

    def mount(self, digest: str, source: str) -> bool:
        """Take a blob over from another repository of this registry without moving it.

        Returns:
            False if the registry does not do that (or forgot the blob): it must be uploaded.
        """
        answer = self._send("POST", "blobs/uploads/", params={"mount": digest, "from": source})
        if answer.status_code == 202:
            self._send("DELETE", self._location(answer), may_miss=True)
        return answer.status_code == 201

    def upload(self, digest: str, data: bytes | Iterable[bytes], size: int) -> None:
        """Upload a blob in one request; ``size`` in bytes."""
        place = self._location(self._send("POST", "blobs/uploads/"))
        headers = {"Content-Type": "application/octet-stream"}
        body = data if isinstance(data, bytes) else _Sized(data, size)
        self._send("PUT", place, params={"digest": digest}, data=body, headers=headers)

    # -- requests -------------------------------------------------------------------------------

    def _location(self, answer: requests.Response) -> str:
        place = urljoin(f"{self._base}/", answer.headers["Location"])
        if urlsplit(place).netloc != self.image.registry:
            raise ConfigError(f"{self.image.registry} sends uploads to another host: {place}")
        return place

    def _send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: bytes | Iterable[bytes] | None = None,
        stream: bool = False,
        may_miss: bool = False,
    ) -> requests.Response:
        url = path if "://" in path else f"{self._base}/v2/{self.image.repository}/{path}"
        body_again = data is None or isinstance(data, bytes)
        for attempt in (1, 2):
            answer = self._once(method, url, headers, params, data, stream)
            if answer.status_code not in (401, 403):
                break
            # A stream cannot be sent twice: its upload was opened with a token that covers it.
            if attempt == 2 or not body_again or not self._authenticate(answer):
                raise CredentialsRefused(
                    f"{self.image.registry} refuses {method} in {self.image.repository} "
                    f"({answer.status_code}): log in, or name the docker config in DOCKER_CONFIG",
                    registry=self.image.registry,
                )
        else:
            raise AssertionError("the loop ends by break or raise")
        if answer.status_code == 429 or answer.status_code >= 500:
            raise ServiceUnavailable(
                f"{self.image.registry} answered {answer.status_code} to {method} {path}",
                registry=self.image.registry,
            )
        if answer.status_code >= 400 and not (may_miss and answer.status_code == 404):
            raise ConfigError(
                f"{self.image.registry} answered {answer.status_code} to {method} {path}: "
                f"{answer.text[:300]}",
                registry=self.image.registry,
            )
        return answer

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        params: Mapping[str, str] | None,
        data: bytes | Iterable[bytes] | None,
        stream: bool,
    ) -> requests.Response:
        named = dict(headers or {})
        if self._authorization is not None:
            named["Authorization"] = self._authorization
        session: requests.Session = self._oras().session
        try:
            return session.request(
                method,
                url,
                headers=named,
                params=params,
                data=data,
                stream=stream,
                timeout=(_CONNECT_S, _READ_S),
            )
        except requests.RequestException as error:
            raise ServiceUnavailable(
                f"{self.image.registry} did not answer {method}: {type(error).__name__}",
                registry=self.image.registry,
            ) from error

    def _oras(self) -> Any:
        if self._client is None:
            client = oras.client.OrasClient(
                hostname=self.image.registry, insecure=self.image.is_loopback
            )
            # Given whole, or it would add the home folder's config to the one that was asked for.
            auth: Any = client.auth
            auth._auth_config = self._docker_config()
            name = f"{self.image.registry}/{self.image.repository}"
            auth.load_configs(oras.container.Container(name))
            # The environment's proxies and .netrc are for browsing, not for a registry's secrets.
            client.session.trust_env = not self.image.is_loopback
            self._client = client
        return self._client

    def _docker_config(self) -> dict[str, Any]:
        folder = self._environ.get("DOCKER_CONFIG")
        path = (Path(folder) if folder else Path.home() / ".docker") / "config.json"
        try:
            found = as_document(path.read_bytes())
        except FileNotFoundError:
            found = {}
        names = ("auths", "credsStore", "credHelpers")
        return {"auths": {}, **{name: found[name] for name in names if name in found}}

    def _authenticate(self, answer: requests.Response) -> bool:
        """Answer a challenge; False if we have nothing (more) to say."""
        challenge = answer.headers.get("WWW-Authenticate", "")
        auth: Any = self._oras().auth
        basic = getattr(auth, "_basic_auth", None)
        kind = challenge.partition(" ")[0].lower()
        if kind == "basic":
            said = f"Basic {basic}" if basic else None
        elif kind == "bearer":
            # The old token may be too small for this: it is never sent again.
            token = auth.request_token(oras.auth.utils.parse_auth_header(challenge))
            said = f"Bearer {token}" if token else None
        else:
            said = None
        is_new = said is not None and (kind == "bearer" or said != self._authorization)
        self._authorization = said
        return is_new


class _Sized:
    """Chunks whose sum is known: sent with a length, which registries want, not in HTTP chunks."""

    def __init__(self, chunks: Iterable[bytes], size: int) -> None:
        self._chunks = chunks
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)


def digest_of(content: bytes) -> str:
    """``sha256:...`` of some bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def canonical(document: object) -> bytes:
    """The JSON whose digest depends on the document alone."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def as_document(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: if it is none.
    """
    try:
        document: object = json.loads(content)
    except ValueError as error:
        raise ConfigError("the registry answered no JSON") from error
    if not isinstance(document, dict):
        raise ConfigError("the registry answered no JSON object")
    return cast("dict[str, Any]", document)
