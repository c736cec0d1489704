"""A folder of an object store, by its S3 API: whole objects, conditional creation, checksums.

Credentials, region and endpoint are those of the process, as every S3 client takes them
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, a role of the machine); nothing of it is kept here.
Blocking: called from threads.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from configs.address import without_login
from runtime.errors import ConfigError, StoreError

SCHEME = "s3://"
PART_BYTES = 64 << 20
"""Objects above it travel in parts of this size, four at a time."""
_CONNECT_S = 10
_READ_S = 60
_ATTEMPTS = 4
"""Of one call, the first included."""
_SHA256 = "sha256"
"""Metadata of every file: what its commit record says of its content."""


class StoreUnreachable(StoreError):
    """The object store did not answer, or refused; what is there is as it was."""

    next_check = "credentials, AWS_ENDPOINT_URL and the bucket of checkpoint.upload; then the store"


def store_name(url: str) -> str:
    """What ``str`` says of the bucket at a URL, without a client: one name for all spellings."""
    name, prefix = _parts(url)
    return f"{SCHEME}{name}/{prefix}".rstrip("/")


def _parts(url: str) -> tuple[str, str]:
    name, _, prefix = url.removeprefix(SCHEME).partition("/")
    return name, prefix.strip("/")


class Bucket:
    """Objects below ``s3://bucket/prefix``.

    Args:
        bucket: its name.
        prefix: put before every name; empty for none, otherwise ends with a slash.
        part_bytes: see PART_BYTES; S3 takes no parts below 5 MiB.
    """

    def __init__(self, bucket: str, prefix: str = "", *, part_bytes: int = PART_BYTES) -> None:
        from boto3.s3.transfer import TransferConfig
        from boto3.session import Session
        from botocore.config import Config

        self._bucket = bucket
        self._prefix = prefix
        self._transfer = TransferConfig(
            multipart_threshold=part_bytes, multipart_chunksize=part_bytes, max_concurrency=4
        )
        self._client: Any = Session().client(
            "s3",
            config=Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            ),
        )

    @classmethod
    def of(cls, url: str, *, part_bytes: int = PART_BYTES) -> Self:
        """The folder at ``s3://bucket/prefix``.

        Raises:
            ConfigError: if that is no such URL.
        """
        name, prefix = _parts(url)
        if not url.startswith(SCHEME) or not name or "@" in name:
            raise ConfigError(
                f"{without_login(url)!r} is no object store: expected s3://bucket/prefix; "
                f"credentials come from the environment (AWS_...)"
            )
        return cls(name, f"{prefix}/" if prefix else "", part_bytes=part_bytes)

    def __str__(self) -> str:
        return f"{SCHEME}{self._bucket}/{self._prefix}".rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        """Make a small object if there is none of that name; False if there is. Atomic.

        Raises:
            StoreUnreachable: if the store did not answer; the object may be there then.
        """
        from botocore.exceptions import ClientError

        with self._reaching(name):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + name, Body=data, IfNoneMatch="*"
                )
            except ClientError as error:
                if error.response["Error"]["Code"] in ("PreconditionFailed", "412"):
                    return False
                raise
        return True

    def read(self, name: str) -> bytes | None:
        """A small object; None if there is none."""
        from botocore.exceptions import ClientError

        with self._reaching(name):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
                return answer["Body"].read()
            except ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                    return None
                raise

    def send(self, name: str, path: Path, *, sha256: str) -> None:
        """Upload a file, in parts where it is large; the store checks what arrives."""
        extra = {"Metadata": {_SHA256: sha256}, "ChecksumAlgorithm": "SHA256"}
        with self._reaching(name):
            self._client.upload_file(
                str(path), self._bucket, self._prefix + name, ExtraArgs=extra, Config=self._transfer
            )

    def has(self, name: str, *, size: int, sha256: str) -> bool:
        """An object of that name, size and recorded content is there."""
        from botocore.exceptions import ClientError

        with self._reaching(name):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                    return False
                raise
        return head["ContentLength"] == size and head["Metadata"].get(_SHA256) == sha256

    def fetch(self, name: str, path: Path) -> bool:
        """Download an object; False if there is none."""
        from botocore.exceptions import ClientError

        path.parent.mkdir(parents=True, exist_ok=True)
        with self._reaching(name):
            try:
                self._client.download_file(
                    self._bucket, self._prefix + name, str(path), Config=self._transfer
                )
            except ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                    return False
                raise
        return True

    def names(self, under: str) -> Iterator[str]:
        """Names of all objects that begin with ``under``, in the order of the store."""
        with self._reaching(under):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + under
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    yield str(found["Key"]).removeprefix(self._prefix)

    def delete(self, names: list[str]) -> None:
        """Delete objects; one that is not there is no error."""
        for name in names:
            with self._reaching(name):
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    @contextmanager
    def _reaching(self, name: str) -> Generator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise StoreUnreachable(f"{self}/{name}: {error}", name=name, store=str(self)) from error
