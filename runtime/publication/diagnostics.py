"""Steps and stacks of a publication, for one that hangs or is slow in ways nobody understands.

``MILEPOST_PUBLICATION_DIAGNOSTICS=1`` in ``launch.env`` of a fresh run switches it on. Each step is
logged with its engine's address and, on the trainer's side, its GPU; while an update runs, Python
stacks of the trainer's ranks go to their log every 60 s. Nothing is synchronised for it and no
deadline changes; it ends with the call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from runtime.errors import ConfigError
from runtime.policy import PolicyId
from runtime.publication.protocol import Target
from runtime.telemetry.events import Event

SWITCH = "MILEPOST_PUBLICATION_DIAGNOSTICS"
STACKS_EVERY_S = 60.0

Step = Literal["connect", "export", "bucket", "broadcast", "load", "request"]

_log: structlog.stdlib.BoundLogger = structlog.get_logger("publication")


def is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """The switch is set.

    Raises:
        ConfigError: if it is neither empty, 0 nor 1.
    """
    text = environ.get(SWITCH, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={text!r}: expected 0 or 1", value=text)
    return text == "1"


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Logs steps, or nothing at all."""

    is_on: bool

    @classmethod
    def off(cls) -> Diagnostics:
        """Logs nothing."""
        return cls(False)

    @classmethod
    def from_environment(cls) -> Diagnostics:
        """As the switch says."""
        return cls(is_on())

    @contextlib.contextmanager
    def step(
        self,
        step: Step,
        *,
        policy: PolicyId | None = None,
        target: Target | None = None,
        **fields: object,
    ) -> Generator[None]:
        """Surround one step with a start, and an end or its exception."""
        if not self.is_on:
            yield
            return
        facts = dict(fields)
        if policy is not None:
            facts["policy"] = str(policy)
        if target is not None:
            facts |= {
                "slot": target.slot,
                "incarnation": target.incarnation,
                "address": target.client.url,
            }
        started = time.monotonic()
        _log.info(Event.PUBLICATION_STEP_STARTED, step=step, **facts)
        try:
            yield
        except BaseException as error:
            elapsed_s = round(time.monotonic() - started, 6)
            _log.info(
                Event.PUBLICATION_STEP_FAILED,
                step=step,
                elapsed_s=elapsed_s,
                error=repr(error),
                **facts,
            )
            raise
        elapsed_s = round(time.monotonic() - started, 6)
        _log.info(Event.PUBLICATION_STEP_FINISHED, step=step, elapsed_s=elapsed_s, **facts)


@contextlib.contextmanager
def stacks_of_this_rank(rank: int, device: Any, call: str) -> Generator[None]:
    """On a trainer rank: log the call with its GPU, and stacks every 60 s until it ends.

    Does nothing unless the switch is set. Stacks go to standard error, which is the rank's log.

    Args:
        rank: of the trainer.
        device: torch's, of this rank.
        call: what the rank was asked for.
    """
    if not is_on():
        yield
        return
    step: Step = "bucket" if call == "send_bucket" else "export"
    with Diagnostics(True).step(step, rank=rank, gpu=_gpu(device), call=call):
        faulthandler.dump_traceback_later(STACKS_EVERY_S, repeat=True, file=sys.__stderr__ or 2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _gpu(device: Any) -> str:
    """The UUID of a GPU, by which it is known outside of this process too."""
    if device.type != "cuda":
        return str(device)
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
