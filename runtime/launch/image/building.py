"""``milepost image build`` and ``inspect``: from a checkout to an image by digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from configs.names import ConflictingNamesError, read_variable
from configs.runtime_lock import RuntimeLock, read_lock
from runtime.errors import ConfigError, LaunchRefused
from runtime.launch.image.buildkit import BuildKit
from runtime.launch.image.labels import ImageLabels
from runtime.launch.image.overlay import RegistryOverlay, image_labels, reference_of
from runtime.launch.image.protocol import Built, ImageBuilder, ImageKey, Where
from runtime.launch.image.reference import ImageReference
from runtime.launch.image.registry import Repository
from runtime.launch.image.source import Checkout

Builder = Literal["registry", "buildkit"]
LOCK_PATH = Path("configs/runtime.lock.json")
"""In a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image of a commit, and what it was made of."""

    image: str
    """``registry/name@sha256:...``."""
    how: Literal["built", "reused"]
    revision: str
    lock_digest: str
    base: str
    tag: str
    mounted: int
    moved: int

    def as_object(self) -> dict[str, Any]:
        """For ``--json`` and receipts."""
        return asdict(self)


def build_image(
    target: str,
    *,
    checkout: Path,
    builder: Builder = "registry",
    environ: Mapping[str, str] = os.environ,
) -> BuiltImage:
    """Build the image of the commit that is checked out, or reuse it. Idempotent.

    Args:
        target: ``registry.host/name``; a tag in it is ignored.
        checkout: anywhere in the git checkout.
        builder: how.
        environ: ``MILEPOST_BASE_IMAGE``, ``DOCKER_CONFIG``.

    Raises:
        DirtyCheckout: if the checkout is more than its commit; nothing was sent.
        ConfigError: if the lock, the base or the target cannot be used.
        ServiceUnavailable: if a registry did not answer.
        CredentialsRefused: if a registry does not take ours.
    """
    tree = Checkout(checkout)
    revision = tree.clean_revision()
    lock = lock_of(tree.top)
    key = ImageKey(revision=revision, lock=lock)
    base = base_of(lock, environ)
    where = Where(base=base, target=ImageReference.parse(target))
    made = make_builder(builder, where, environ).build(key, tree)
    return _described(made, key, base)


def make_builder(builder: Builder, where: Where, environ: Mapping[str, str]) -> ImageBuilder:
    """The builder of a name."""
    if builder == "buildkit":
        return BuildKit(where, environ=environ)
    return RegistryOverlay(where, environ=environ)


def lock_of(checkout: Path) -> RuntimeLock:
    """The committed lock of a checkout.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    path = checkout / LOCK_PATH
    try:
        return read_lock(path)
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is no runtime lock: {error}") from error


def base_of(lock: RuntimeLock, environ: Mapping[str, str]) -> ImageReference:
    """Where the locked base is read from.

    Raises:
        ConfigError: if no base is locked, or ``MILEPOST_BASE_IMAGE`` names another image.
    """
    if lock.base is None:
        raise ConfigError(
            f"{LOCK_PATH} names no base to build on: `milepost image lock registry.host/name` "
            "resolves one and writes it there; commit that file, then build again"
        )
    try:
        local = read_variable("BASE_IMAGE", environ)
    except ConflictingNamesError as error:
        raise ConfigError(str(error)) from error
    if not local:
        return ImageReference.parse(lock.base.reference)
    copy = ImageReference.parse(local)
    found = Repository(copy, environ=environ).manifest(copy.name)
    if found is None or found[1] != lock.base.digest:
        raise ConfigError(
            f"MILEPOST_BASE_IMAGE is {local} ({found[1] if found else 'not there'}); the lock "
            f"names {lock.base.digest}"
        )
    return copy.at(found[1])


def resolve_base(reference: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """The immutable name of what a tag means now, for the lock.

    Raises:
        ConfigError: if there is no such image.
    """
    image = ImageReference.parse(reference)
    found = Repository(image, environ=environ).manifest(image.name)
    if found is None:
        raise ConfigError(f"{image} is not there")
    return str(image.at(found[1]))


def lock_base(reference: str, checkout: Path, *, environ: Mapping[str, str] = os.environ) -> str:
    """Write the immutable name of a base into the checkout's lock; returns it.

    Raises:
        ConfigError: if there is no such image, or the checkout has no lock.
    """
    top = Checkout(checkout).top
    locked = resolve_base(reference, environ=environ)
    lock = lock_of(top).model_dump(mode="json")
    beaker = (lock["base"] or {}).get("beaker") if lock["base"] else None
    if lock["base"] is None or lock["base"]["reference"] != locked:
        beaker = None  # of another image
    lock["base"] = {"reference": locked, "beaker": beaker}
    (top / LOCK_PATH).write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
    return locked


def inspect_image(
    image: str, *, platform: str = "linux/amd64", environ: Mapping[str, str] = os.environ
) -> ImageLabels:
    """What an image of ours says about itself.

    Raises:
        LaunchRefused: if it is not there, or is none of ours.
        ConfigError: if it is named by a tag.
    """
    reference = reference_of(image)
    labels = image_labels(Repository(reference, environ=environ), reference.name, platform)
    if labels is None:
        raise LaunchRefused(f"{image} is not there")
    return ImageLabels.read(labels, image)


def _described(made: Built, key: ImageKey, base: ImageReference) -> BuiltImage:
    return BuiltImage(
        image=str(made.image),
        how=made.how,
        revision=key.revision.commit,
        lock_digest=key.lock.digest,
        base=str(base),
        tag=key.tag,
        mounted=made.mounted,
        moved=made.moved,
    )
