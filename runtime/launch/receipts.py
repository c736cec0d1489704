"""Launch receipts: what was submitted where, kept by the submitter and portable between hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.names import read_variable
from runtime.errors import StoreError
from runtime.launch.submission import attempt_key
from runtime.rundir import atomic
from runtime.telemetry.events import Event

FOLDER = "LAUNCH_RECEIPTS"
"""``MILEPOST_LAUNCH_RECEIPTS``: the folder, instead of the user's cache."""


class LaunchReceipt(BaseModel):
    """One attempt as it was sent. Written before the call goes out, and again after its answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    key: str
    """The attempt's name at the scheduler."""
    run: str
    root: str
    attempt: int
    backend: str
    cluster: str | None
    """Address or name of what it was sent to."""
    job: str | None = None
    """The scheduler's id; None: the answer was lost, or has not come yet."""
    spec_digest: str
    """Its first 16 digits only, where the job follows another run file of the same training."""
    training_digest: str
    image: str | None
    image_revision: str | None = None
    """From the image's label; None without an image, or where it could not be read."""
    revision: str | None
    """Commit of the submitter's checkout; None where there is none."""
    dirty: bool
    """The submitter's checkout was more than its commit."""
    auto_resume: str | None = None
    """As submitted; None in receipts from before the field."""
    environment: dict[str, str] = Field(default_factory=dict)
    """What the job got because of its cluster."""
    requested_gpus: int = 0
    active_gpus: int | None = None
    """GPUs of the replicas, the most that ran at once; None before a job event told."""
    allocated_gpus: int | None = None
    """GPU slots that were paid for at once: a large memory request can take more than were asked
    for."""
    turned_away: bool = False
    """It ended because another process owned the run: it counts as no attempt of the training."""
    time: float
    """Seconds since the Unix epoch, of the first writing."""
    detail: dict[str, Any] = Field(default_factory=dict)
    """What the backend needs to find its job again."""


def receipts_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where receipts lie on this host."""
    given = read_variable(FOLDER, environ)
    return Path(given) if given else user_cache_path("milepost") / "launches"


class Receipts:
    """The receipts of one folder. Atomic; two submitters of one attempt write one file."""

    def __init__(self, folder: Path | None = None) -> None:
        """None takes ``receipts_folder()``."""
        self.folder = folder or receipts_folder()

    def write(self, receipt: LaunchReceipt) -> None:
        """Write or replace the receipt of an attempt.

        Raises:
            DiskFull: if there was no space.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        data = receipt.model_dump_json(indent=1).encode() + b"\n"
        atomic.write_bytes(self._path(receipt), data, durable=True)

    def note_gpus(
        self, receipt: LaunchReceipt, *, active: int | None, allocated: int | None
    ) -> LaunchReceipt:
        """Keep the most that job events told about GPUs; replicas come and go. Idempotent.

        For people alone: figures that cannot be kept are logged, and nothing is raised.

        Args:
            receipt: as it was read before the scheduler was asked; what others wrote to it or took
                back since then counts.
            active: GPUs of the replicas that run; None: not told.
            allocated: GPU slots that are paid for; None: not told.

        Returns:
            The receipt as it stands now, with the figures, kept or not.
        """
        told = {"active_gpus": active, "allocated_gpus": allocated}
        try:
            standing = _read(self._path(receipt))
            noted = _with_most(standing or receipt, told)
            if standing is not None and noted != standing:
                self.write(noted)
        except (OSError, StoreError) as error:
            _say_unnoted(receipt, error, **told)
            return _with_most(receipt, told)
        return noted

    def note_turned_away(self, receipt: LaunchReceipt) -> None:
        """Keep that another owner of the run turned this attempt away. Idempotent.

        Where it cannot be kept that is logged, and the attempt counts like any other.

        Args:
            receipt: as it was read before the scheduler was asked.
        """
        try:
            standing = _read(self._path(receipt))
            if standing is not None and not standing.turned_away:
                self.write(standing.model_copy(update={"turned_away": True}))
        except (OSError, StoreError) as error:
            _say_unnoted(receipt, error, turned_away=True)

    def remove(self, receipt: LaunchReceipt) -> None:
        """Take a receipt back: nothing of ours runs under its name. Idempotent."""
        self._path(receipt).unlink(missing_ok=True)

    def read(self, run: str, root: Path, attempt: int) -> LaunchReceipt | None:
        """The receipt of an attempt; None where there is none, or it cannot be read."""
        return _read(self.folder / f"{attempt_key(run, root, attempt)}.json")

    def of_root(self, root: Path) -> list[LaunchReceipt]:
        """All receipts of a run's root, oldest attempt first."""
        found = (_read(path) for path in sorted(self.folder.glob("*.json")))
        ours = [each for each in found if each is not None and each.root == str(root)]
        return sorted(ours, key=lambda each: (each.attempt, each.time))

    def _path(self, receipt: LaunchReceipt) -> Path:
        return self.folder / f"{receipt.key}.json"


def _say_unnoted(receipt: LaunchReceipt, error: Exception, **facts: object) -> None:
    # Loaded here: it brings rich, which `status` has no need of.
    from runtime.telemetry.log import get_logger

    get_logger().warning(Event.LAUNCH_UNNOTED, key=receipt.key, **facts, error=str(error))


def _with_most(receipt: LaunchReceipt, told: Mapping[str, int | None]) -> LaunchReceipt:
    most = {k: max(v, getattr(receipt, k) or 0) for k, v in told.items() if v is not None}
    return receipt.model_copy(update=most)


def _read(path: Path) -> LaunchReceipt | None:
    data = atomic.read_bytes(path)
    if data is None:
        return None
    try:
        return LaunchReceipt.model_validate_json(data)
    except ValidationError:
        return None
