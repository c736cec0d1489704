"""Building through BuildKit, where there is one: for bases that need a RUN step."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import ConfigError, ServiceUnavailable
from runtime.launch.image.labels import ImageLabels
from runtime.launch.image.overlay import SOURCE_ROOT, image_labels
from runtime.launch.image.protocol import Built, ImageKey, Where
from runtime.launch.image.registry import Repository, as_document
from runtime.launch.image.source import Checkout

BUILDER = "buildkit/1"
_DEADLINE_S = 3600.0
_DIGEST = "containerimage.digest"
_DOCKERFILE = f"""\
ARG BASE
FROM ${{BASE}}
COPY tree/ /{SOURCE_ROOT}/
ENV PYTHONPATH=/{SOURCE_ROOT}
WORKDIR /{SOURCE_ROOT}
"""


class BuildKit:
    """Implements ImageBuilder through ``docker buildx build``.

    The digest is not known before the build, so an image is looked for under the key's tag, and its
    labels, not the tag, decide whether it is the one.
    """

    name = BUILDER

    def __init__(
        self,
        where: Where,
        *,
        command: Sequence[str] = ("docker", "buildx", "build"),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Build from ``where.base`` into ``where.target``'s repository."""
        self._where = where
        self._command = tuple(command)
        self._environ = environ
        self._target = Repository(where.target, environ=environ)

    def build(self, key: ImageKey, checkout: Checkout) -> Built:
        """See ImageBuilder."""
        standing = self._target.manifest(key.tag)
        if standing is not None:
            labels = image_labels(self._target, standing[1], key.lock.platform) or {}
            try:
                found = ImageLabels.read(labels, key.tag)
            except ConfigError:
                found = None  # whoever's image that is: the tag will point to ours
            if found is not None and found.is_of(key.revision.commit, key.lock, key.base_digest):
                return Built(image=self._where.target.at(standing[1]), how="reused")
        with tempfile.TemporaryDirectory(prefix="mp-build-") as name:
            folder = Path(name)
            (folder / "tree").mkdir()
            checkout.export(key.revision, folder / "tree")
            (folder / "Dockerfile").write_text(_DOCKERFILE, encoding="ascii")
            digest = self._run(key, folder)
        return Built(image=self._where.target.at(digest), how="built")

    def argv(self, key: ImageKey, folder: Path) -> list[str]:
        """The command that builds the context in ``folder``."""
        target, base = self._where.target, self._where.base
        name = f"{target.registry}/{target.repository}:{key.tag}"
        labels = ImageLabels.of(key.revision.commit, key.lock, key.base_digest, BUILDER)
        output = f"type=image,name={name},push=true,oci-mediatypes=true,rewrite-timestamp=true"
        return [
            *self._command,
            "--provenance=false",
            f"--platform={key.lock.platform}",
            f"--build-arg=BASE={base.registry}/{base.repository}@{key.base_digest}",
            *(f"--label={name}={value}" for name, value in labels.as_labels().items()),
            f"--metadata-file={folder / 'metadata.json'}",
            f"--output={output}",
            f"--file={folder / 'Dockerfile'}",
            str(folder),
        ]

    def _run(self, key: ImageKey, folder: Path) -> str:
        try:
            done = subprocess.run(
                self.argv(key, folder),
                env={**self._environ, "SOURCE_DATE_EPOCH": str(key.revision.time)},
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self._command[0]} is not installed: build with --builder registry"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ServiceUnavailable(f"BuildKit did not end within {_DEADLINE_S:g} s") from error
        if done.returncode != 0:
            said = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise ConfigError(f"BuildKit failed with {done.returncode}: {said}")
        metadata = as_document((folder / "metadata.json").read_bytes())
        digest = metadata.get(_DIGEST)
        if not isinstance(digest, str):
            raise ConfigError(f"BuildKit's metadata has no {_DIGEST}")
        return digest
