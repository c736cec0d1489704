"""Laying the committed tree over the base through the registry: nothing is pulled or unpacked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from configs.runtime_lock import RuntimeLock
from runtime.errors import ConfigError
from runtime.launch.image.labels import ImageLabels
from runtime.launch.image.protocol import Built, ImageKey, Where
from runtime.launch.image.reference import ImageReference
from runtime.launch.image.registry import (
    INDEX_TYPES,
    Repository,
    as_document,
    canonical,
    digest_of,
)
from runtime.launch.image.source import Checkout

BUILDER = "registry-overlay/1"
SOURCE_ROOT = "opt/milepost"
"""Folder of the tree in an image; the job's working directory."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_OCI_NAMES = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{_LAYER}+gzip",
    "application/vnd.docker.image.rootfs.diff.tar": _LAYER,
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip": f"{_LAYER}+gzip",
}


class RegistryOverlay:
    """Implements ImageBuilder: the digest is known before anything is sent."""

    name = BUILDER

    def __init__(self, where: Where, *, environ: Mapping[str, str] = os.environ) -> None:
        """Build from ``where.base`` into ``where.target``'s repository."""
        self._where = where
        self._target = Repository(where.target, environ=environ)
        self._source = Repository(where.base, environ=environ)

    def build(self, key: ImageKey, checkout: Checkout) -> Built:
        """Lay the commit over the base; see ImageBuilder. Repeating it sends nothing."""
        base, config = read_base(self._source, key.lock)
        layer = checkout.archive(key.revision, prefix=SOURCE_ROOT)
        new_config = canonical(_config(config, key, digest_of(layer)))
        manifest = canonical(_manifest(base, new_config, layer))
        digest = digest_of(manifest)
        image = self._where.target.at(digest)
        if self._target.has_manifest(digest):
            self._target.put_manifest(key.tag, manifest, _MANIFEST)
            return Built(image=image, how="reused")
        mounted, moved = self._bring_base_layers(base)
        for content in (layer, new_config):
            if not self._target.has_blob(name := digest_of(content)):
                self._target.upload(name, content, len(content))
        self._target.put_manifest(digest, manifest, _MANIFEST)
        self._target.put_manifest(key.tag, manifest, _MANIFEST)
        return Built(image=image, how="built", mounted=mounted, moved=moved)

    def _bring_base_layers(self, base: Mapping[str, Any]) -> tuple[int, int]:
        """Make the target repository know the base's layers; (mounted, moved) counts."""
        same = self._where.base.registry == self._where.target.registry
        mounted = moved = 0
        for each in base["layers"]:
            digest = str(each["digest"])
            # Mounting also widens the token to both repositories, so it is asked first.
            if same and self._target.mount(digest, self._where.base.repository):
                mounted += 1
            elif not self._target.has_blob(digest):
                self._target.upload(digest, self._source.stream(digest), int(each["size"]))
                moved += 1
        return mounted, moved


def read_base(source: Repository, lock: RuntimeLock) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and config of the locked base for the locked platform.

    Raises:
        ConfigError: if the registry does not have it, or it has no such platform.
    """
    assert lock.base is not None  # whoever has a key has a base
    found = source.manifest(lock.base.digest)
    if found is None:
        raise ConfigError(f"{source.image.registry} does not have the base {lock.base.digest}")
    manifest = as_document(found[0])
    if manifest.get("mediaType") in INDEX_TYPES or "manifests" in manifest:
        digest = _for_platform(manifest, lock.platform)
        found = source.manifest(digest)
        if found is None:
            raise ConfigError(f"the base's index names {digest}, which its registry does not have")
        manifest = as_document(found[0])
    return manifest, as_document(source.blob(manifest["config"]["digest"]))


def _for_platform(index: Mapping[str, Any], platform: str) -> str:
    names: list[str] = []
    for each in index["manifests"]:
        found = each.get("platform", {})
        parts = (found.get("os"), found.get("architecture"), found.get("variant"))
        name = "/".join(part for part in parts if part)
        if name == platform or name.startswith(f"{platform}/"):
            return str(each["digest"])
        names.append(name)
    raise ConfigError(f"the base has no {platform}, only {', '.join(names)}")


def _config(base: Mapping[str, Any], key: ImageKey, diff_id: str) -> dict[str, Any]:
    inner = dict(base.get("config") or {})
    labels = ImageLabels.of(key.revision.commit, key.lock, key.base_digest, BUILDER)
    inner["Labels"] = {**(inner.get("Labels") or {}), **labels.as_labels()}
    path = f"/{SOURCE_ROOT}"
    given = dict(entry.partition("=")[::2] for entry in inner.get("Env") or [])
    given["PYTHONPATH"] = ":".join(filter(None, (path, given.get("PYTHONPATH"))))
    inner["Env"] = [f"{name}={value}" for name, value in given.items()]
    inner["WorkingDir"] = path
    created = key.created
    step = {"created": created, "created_by": f"{BUILDER} {key.revision.commit}"}
    rootfs = base["rootfs"]
    return {
        **base,
        "created": created,
        "config": inner,
        "history": [*(base.get("history") or []), step],
        "rootfs": {**rootfs, "diff_ids": [*rootfs["diff_ids"], diff_id]},
    }


def _manifest(base: Mapping[str, Any], config: bytes, layer: bytes) -> dict[str, Any]:
    layers = [
        {
            "mediaType": _OCI_NAMES.get(each["mediaType"], each["mediaType"]),
            "digest": each["digest"],
            "size": each["size"],
        }
        for each in base["layers"]
    ]
    return {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIG, config),
        "layers": [*layers, _descriptor(_LAYER, layer)],
    }


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}


def image_labels(repository: Repository, name: str, platform: str) -> dict[str, str] | None:
    """Labels of an image; None if there is no image of that name.

    Raises:
        ConfigError: if it is no image for the platform.
    """
    found = repository.manifest(name)
    if found is None:
        return None
    manifest = as_document(found[0])
    if "manifests" in manifest:
        found = repository.manifest(_for_platform(manifest, platform))
        if found is None:
            return None
        manifest = as_document(found[0])
    config = as_document(repository.blob(manifest["config"]["digest"]))
    return dict((config.get("config") or {}).get("Labels") or {})


def reference_of(text: str) -> ImageReference:
    """A reference that names its image by digest.

    Raises:
        ConfigError: if it is a tag.
    """
    image = ImageReference.parse(text)
    if image.digest is None:
        raise ConfigError(f"{text}: a tag can come to mean another image; give @sha256:...")
    return image
