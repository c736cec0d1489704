"""From what a run asks for to the image that its job gets, once and before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from configs.run import RunSpec
from configs.runtime_lock import read_lock
from runtime.errors import LaunchRefused
from runtime.launch.image.building import build_image, inspect_image
from runtime.launch.image.choosing import check_labels
from runtime.launch.submitting import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A sender with its image."""

    sender: Sender
    how: Literal["existing", "built", "reused"] | None
    """None: there is no image, the code travels as files or lies there."""


def settle(
    spec: RunSpec,
    sender: Sender,
    *,
    build: str | None,
    checkout: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settled:
    """Build the image, or look at the existing one. Idempotent.

    Args:
        spec: the run.
        sender: with the existing image, if one is named.
        build: ``registry.host/name`` to build into; None builds nothing.
        checkout: of the sources; None: this Milepost's own.
        environ: credentials.

    Raises:
        LaunchRefused: if both are asked for, or the image cannot run this job.
        ServiceUnavailable: if a registry did not answer.
    """
    if build is not None and sender.image is not None:
        raise LaunchRefused(
            f"{sender.image} is named and {build} is to be built: a run has one image"
        )
    lock = read_lock()
    if build is not None:
        top = checkout or Path(__file__).resolve().parents[3]
        built = build_image(build, checkout=top, environ=environ)
        labels = inspect_image(built.image, platform=lock.platform, environ=environ)
        check_labels(labels, built.image, lock=lock, requires=spec.launch.requires)
        made = replace(sender, image=built.image, image_revision=built.revision)
        return Settled(sender=made, how=built.how)
    if sender.image is None:
        return Settled(sender=sender, how=None)
    if "@" not in sender.image:
        # Registered at a scheduler that does not tell labels: its features stay unverified.
        return Settled(sender=sender, how="existing")
    labels = inspect_image(sender.image, platform=lock.platform, environ=environ)
    check_labels(labels, sender.image, lock=lock, requires=spec.launch.requires)
    return Settled(sender=replace(sender, image_revision=labels.revision), how="existing")
