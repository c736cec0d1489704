"""Which image a run uses: one that is named, or none. Never one that Milepost chose by itself."""

from __future__ import annotations

from collections.abc import Mapping

from configs.names import ConflictingNamesError, read_variable
from configs.runtime_lock import RuntimeLock
from runtime.errors import ConfigError, LaunchRefused
from runtime.launch.image.labels import ImageLabels


def existing_image(named: str | None, environ: Mapping[str, str]) -> str | None:
    """The image of the run file or of ``MILEPOST_EXISTING_IMAGE``; None where neither names one.

    Raises:
        ConfigError: if they name different ones, or a tag.
    """
    from configs.launch import is_immutable_image

    try:
        given = read_variable("EXISTING_IMAGE", environ) or None
    except ConflictingNamesError as error:
        raise ConfigError(str(error)) from error
    if given is not None and not is_immutable_image(given):
        raise ConfigError(
            f"MILEPOST_EXISTING_IMAGE = {given}: a tag or alias can come to mean another image; "
            "give a digest or a Beaker image id"
        )
    if named is not None and given is not None and named != given:
        raise ConfigError(
            f"launch.image is {named} and MILEPOST_EXISTING_IMAGE is {given}: unset one of them"
        )
    return named or given


def check_labels(
    labels: ImageLabels, image: str, *, lock: RuntimeLock, requires: tuple[str, ...]
) -> None:
    """Refuse an image that cannot run a job of this checkout.

    Raises:
        LaunchRefused: naming what is missing.
    """
    problems = labels.problems(lock, requires)
    if problems:
        raise LaunchRefused(f"{image}: {'; '.join(problems)}")
