"""What every builder of images does, and what it is asked with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from configs.runtime_lock import RuntimeLock
from runtime.launch.image.reference import ImageReference
from runtime.launch.image.source import Checkout, Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageKey:
    """What an image is made of. The same key, the same digest."""

    revision: Revision
    lock: RuntimeLock

    @property
    def base_digest(self) -> str:
        """Of the locked base."""
        assert self.lock.base is not None  # see building.key_of
        return self.lock.base.digest

    @property
    def tag(self) -> str:
        """A name for people, and for builders that cannot tell their digest; never believed."""
        return f"src-{self.revision.commit[:12]}-{self.lock.digest.removeprefix('sha256:')[:12]}"

    @property
    def created(self) -> str:
        """The commit's time, as images write it."""
        return datetime.fromtimestamp(self.revision.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an image comes from and goes to."""

    base: ImageReference
    target: ImageReference
    """Its repository counts; tag and digest do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What came of a build."""

    image: ImageReference
    """By digest."""
    how: Literal["built", "reused"]
    mounted: int = 0
    """Layers of the base that were taken over without moving them."""
    moved: int = 0
    """Layers of the base that had to be copied from another registry."""


class ImageBuilder(Protocol):
    """Makes the image of a commit in the target repository.

    Idempotent: the same key gives the same digest, and an image that stands is reused. Nothing is
    left under the key's tag before the whole image is there.
    """

    name: str

    def build(self, key: ImageKey, checkout: Checkout) -> Built:
        """Build, or reuse.

        Raises:
            ConfigError: if the base is not there, or is none.
            ServiceUnavailable: if a registry did not answer; nothing needs cleaning up.
            CredentialsRefused: if a registry does not take ours.
        """
        ...
