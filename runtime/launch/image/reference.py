"""Names of images: registry, repository, tag, digest."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from runtime.errors import ConfigError

_REFERENCE = re.compile(
    r"(?P<registry>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-f:]+\](?::\d+)?)/"
    r"(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """``registry/repository[:tag][@digest]``; a registry is always named, no default is assumed."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """Read a reference.

        Raises:
            ConfigError: if it names no registry, or is none.
        """
        match = _REFERENCE.fullmatch(text)
        is_host = match is not None and re.search(r"[.:]|^localhost$", match["registry"])
        if match is None or not is_host:
            raise ConfigError(f"{text!r} is no image: registry.host/name[:tag][@sha256:...]")
        return cls(**match.groupdict())

    @property
    def is_loopback(self) -> bool:
        """The registry is on this machine: plain HTTP, as container tools take it."""
        host = self.registry.rpartition(":")[0] or self.registry
        return host in ("localhost", "[::1]") or host.startswith("127.")

    @property
    def name(self) -> str:
        """``tag`` or ``digest`` for the registry's manifest URL; the digest wins."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> ImageReference:
        """The same repository at a digest, without a tag."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        """As it is written."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"
