"""``plan --render``: the document that a submission would send, without sending it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from configs.load import LoadedRun
from configs.plan import make_plan
from runtime.errors import ConfigError
from runtime.launch.composing import scheduler_claim, submission_of
from runtime.launch.image.choosing import existing_image
from runtime.launch.sending import backend_of
from runtime.launch.submission import canonical_json
from runtime.launch.submitting import refuse


def rendered(
    loaded: LoadedRun,
    *,
    image: str | None = None,
    attempt: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The exact document as JSON, once it passed every check.

    Args:
        loaded: the run file.
        image: None takes the run file's, or the environment's.
        attempt: the number it is rendered for.
        environ: names the image and the backend's address.

    Raises:
        LaunchRefused: with every breach of the contract by its name.
        ConfigError: if the run is local, or names no address.
    """
    if loaded.spec.launch.backend == "local":
        raise ConfigError('launch.backend = "local": nothing is submitted, so there is no document')
    chosen = existing_image(image or loaded.spec.launch.image, environ)
    plan = make_plan(loaded)
    backend = backend_of(loaded.spec, environ=environ)
    claim = scheduler_claim(backend.name, loaded.spec.model_dump_json(), plan)
    submission = submission_of(loaded, plan, attempt=attempt, image=chosen, claim=claim)
    refuse(backend, submission)
    return canonical_json(backend.render(submission))
