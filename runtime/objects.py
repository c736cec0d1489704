"""An object store (S3) as the few verbs that archives and exports need.

Credentials and endpoint are the machine's own (role, profile, ``AWS_ENDPOINT_URL``), never a run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from runtime.errors import ConfigError, StoreError
from runtime.rundir import atomic

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_ATTEMPTS = 4
"""Of one call, the first included."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A prefix in a bucket. Names below it are given without it. Thread-safe; every call blocks."""

    name: str
    prefix: str
    client: Any
    """boto3's; it has no types."""

    @classmethod
    def of(cls, url: str) -> Self:
        """The place that ``s3://bucket/prefix`` names.

        Raises:
            ConfigError: if it names none.
        """
        rest = url.removeprefix("s3://")
        name, _, prefix = rest.partition("/")
        if rest == url or not name:
            raise ConfigError(f"{url!r} is no object store: s3://bucket/prefix")
        from boto3.session import Session
        from botocore.config import Config

        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        )
        return cls(name, prefix.strip("/"), Session().client("s3", config=config))

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self.client.get_object(Bucket=self.name, Key=self._key(name))["Body"].read()
        except ClientError as error:
            if _code(error) in ("NoSuchKey", "404"):
                return None
            raise self._failed("read", name, error) from error
        except BotoCoreError as error:
            raise self._failed("read", name, error) from error

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object; False where it exists, and nothing was written then."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.put_object(
                Bucket=self.name, Key=self._key(name), Body=data, IfNoneMatch="*"
            )
        except ClientError as error:
            if _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return False
            raise self._failed("create", name, error) from error
        except BotoCoreError as error:
            raise self._failed("create", name, error) from error
        return True

    def upload(self, path: Path, name: str) -> None:
        """Upload a file in parts, over an older object of the name."""
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.upload_file(str(path), self.name, self._key(name))
        except (BotoCoreError, ClientError, S3UploadFailedError) as error:
            raise self._failed("upload", name, error) from error

    def download(self, name: str, to: Path) -> None:
        """Download to a file.

        Raises:
            DiskFull: if there is no room.
            StoreError: if it cannot be read.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with atomic.disk_full_as_error(to):
                self.client.download_file(self.name, self._key(name), str(to))
        except (BotoCoreError, ClientError) as error:
            raise self._failed("download", name, error) from error

    def delete(self, name: str) -> None:
        """Delete an object; none is no error."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.delete_object(Bucket=self.name, Key=self._key(name))
        except (BotoCoreError, ClientError) as error:
            raise self._failed("delete", name, error) from error

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _failed(self, what: str, name: str, error: Exception) -> StoreError:
        return StoreError(f"could not {what} s3://{self.name}/{self._key(name)}: {error}")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
