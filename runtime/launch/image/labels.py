"""What an image of ours says about itself, and whether that is enough for a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, cast

from configs.runtime_lock import RuntimeLock
from runtime.errors import LaunchRefused

REVISION = "org.opencontainers.image.revision"
BASE = "org.opencontainers.image.base.digest"
LOCK = "milepost.lock.digest"
BUILDER = "milepost.builder"
FEATURES = "milepost.features"
ENTRY_POINTS = "milepost.entry-points"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLabels:
    """The labels of one image."""

    revision: str
    lock_digest: str
    base_digest: str
    builder: str
    features: tuple[str, ...]
    entry_points: Mapping[str, str]

    @classmethod
    def of(cls, revision: str, lock: RuntimeLock, base_digest: str, builder: str) -> Self:
        """The labels an image of a commit gets."""
        return cls(
            revision=revision,
            lock_digest=lock.digest,
            base_digest=base_digest,
            builder=builder,
            features=tuple(sorted(lock.features)),
            entry_points=dict(lock.entry_points),
        )

    @classmethod
    def read(cls, labels: Mapping[str, str], image: str) -> Self:
        """Read them off an image.

        Raises:
            LaunchRefused: if they are missing: the image is none of ours.
        """
        missing = [n for n in (REVISION, LOCK, BASE, FEATURES, ENTRY_POINTS) if n not in labels]
        if missing:
            raise LaunchRefused(
                f"{image} has no label {', '.join(missing)}: it was not built by "
                "`milepost image build`, and nothing is known about what is in it"
            )
        try:
            points: object = json.loads(labels[ENTRY_POINTS])
        except ValueError:
            points = None
        if not isinstance(points, dict):
            raise LaunchRefused(f"{image}: label {ENTRY_POINTS} cannot be read: rebuild the image")
        return cls(
            revision=labels[REVISION],
            lock_digest=labels[LOCK],
            base_digest=labels[BASE],
            builder=labels.get(BUILDER, ""),
            features=tuple(labels[FEATURES].split()),
            entry_points=cast("dict[str, str]", points),
        )

    def as_labels(self) -> dict[str, str]:
        """As an image carries them."""
        return {
            REVISION: self.revision,
            LOCK: self.lock_digest,
            BASE: self.base_digest,
            BUILDER: self.builder,
            FEATURES: " ".join(self.features),
            ENTRY_POINTS: json.dumps(dict(self.entry_points), sort_keys=True),
        }

    def is_of(self, revision: str, lock: RuntimeLock, base_digest: str) -> bool:
        """The image is of this commit, lock and base, whoever built it."""
        found = (self.revision, self.lock_digest, self.base_digest)
        return found == (revision, lock.digest, base_digest)

    def problems(self, lock: RuntimeLock, requires: tuple[str, ...]) -> list[str]:
        """Why a job of this checkout cannot use the image; empty when it can.

        Args:
            lock: of this checkout: its entry points are what will be called.
            requires: features of the run file.
        """
        lost = [n for n, module in lock.entry_points.items() if self.entry_points.get(n) != module]
        found = (
            [f"the image has no entry point {', '.join(lost)}: rebuild the image"] if lost else []
        )
        absent = [name for name in requires if name not in self.features]
        if absent:
            found.append(
                f"the run needs {', '.join(absent)} (launch.requires); the image has "
                f"{', '.join(self.features) or 'no features'}"
            )
        return found
