"""The HF export: a folder that transformers and engines load, equal to the trainer bit by bit.

Staged beside, synced, read back, renamed: a folder named ``export`` is whole. What proves it lies
in it as ``milepost.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import anyio
import anyio.to_thread
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.checkpoints.files import damage_of, remove_folder, seal
from runtime.checkpoints.readback import checksums_of, stored_tensors
from runtime.checkpoints.resume import Restorable, check_restored
from runtime.errors import PartialWrite
from runtime.policy import PolicyId
from runtime.publication.disk import WeightSource, Written
from runtime.rundir import atomic
from runtime.rundir.layout import EXPORT_RECEIPT, RunRoot
from runtime.rundir.records import FileEntry
from runtime.telemetry.events import Event

RECEIPT = EXPORT_RECEIPT
_MODEL_CONFIG = "config.json"
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
)
"""Of the model the run began with; everything else in its folder goes along."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger("checkpoints")


class ExportReceipt(BaseModel):
    """What was exported, and that it reads back equal. Stored beside the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    policy: str
    update: int
    epoch: int
    """Of the session that exported, which may be later than the policy's."""
    source: Literal["trainer", "commit"]
    num_tensors: int
    num_bytes: int
    """Of the weights' data."""
    checksums: dict[str, str]
    """By HF name, as in publications: of the trainer's tensors, and of what was read back."""
    files: tuple[FileEntry, ...]
    """All files but this one."""

    @property
    def is_model(self) -> bool:
        """Whether an engine loads it as it is; adapters alone need their base beside them."""
        return any(entry.name == _MODEL_CONFIG for entry in self.files)


class LiveWeights(WeightSource, Protocol):
    """A trainer that may hold adapters."""

    async def write_adapter(self, folder: str) -> Written:
        """Write the adapters alone, in peft's format; ConfigError where there are none."""
        ...


class Restoring(LiveWeights, Protocol):
    """A trainer that can be brought to a commit."""

    async def load(self, model_path: str) -> dict[str, object]:
        """Load HF weights."""
        ...

    async def restore(self, folder: str) -> dict[str, object]:
        """Load a committed state; returns ``update`` and ``consumed_digest``."""
        ...


async def export_live(
    root: RunRoot,
    source: LiveWeights,
    policy: PolicyId,
    *,
    model: Path,
    epoch: int,
    final: bool,
    adapter: bool = False,
) -> ExportReceipt:
    """Export what the trainer holds now. Idempotent: an export of the same name is replaced.

    Args:
        root: the output root.
        source: the trainer, standing still at ``policy``.
        policy: what it holds.
        model: folder of the initial model, for config, tokenizer and generation config.
        epoch: of the caller.
        final: into ``export/``; otherwise into ``export-<update>/``.
        adapter: the adapters alone, in peft's format; otherwise whole weights.

    Raises:
        DiskFull: if there is no room; nothing is left behind then.
        PartialWrite: if what was written does not read back equal.
    """
    to = root.export if final else root.export_at(policy.update)
    write = source.write_adapter if adapter else source.write_snapshot
    companions = None if adapter else model
    return await _export(to, write, policy, companions, epoch, "trainer", _nothing)


async def export_snapshot(
    root: RunRoot,
    source: WeightSource,
    policy: PolicyId,
    *,
    model: Path,
    epoch: int,
    on_written: Callable[[], None],
) -> ExportReceipt:
    """Export what the trainer holds now into ``snapshots/<policy>/``, as ``export_live`` does.

    Args:
        root: the output root.
        source: the trainer, standing still at ``policy`` until ``on_written``.
        policy: what it holds.
        model: folder of the initial model.
        epoch: of the caller.
        on_written: called once the weights have left the trainer, which may go on then; reading
            back, digests and syncing follow beside training.

    Raises:
        DiskFull, PartialWrite: as ``export_live``.
    """
    to = root.snapshots / str(policy)
    to.parent.mkdir(exist_ok=True)
    return await _export(to, source.write_snapshot, policy, model, epoch, "trainer", on_written)


async def export_commit(
    root: RunRoot,
    trainer: Restoring,
    restorable: Restorable,
    *,
    model: Path,
    epoch: int,
    to: Path | None = None,
    adapter: bool = False,
) -> ExportReceipt:
    """Export a commit through a trainer that is brought to it.

    Args:
        root: the output root.
        trainer: of any number of ranks.
        restorable: the commit.
        model: folder of the initial model.
        epoch: of the caller.
        to: the folder to make; None: ``export-<update>/``.
        adapter: the adapters alone, in peft's format; otherwise whole weights.

    Raises:
        ContractViolation: if the trainer restores something else than the commit.
        DiskFull, PartialWrite: as ``export_live``.
    """
    await trainer.load(str(model))
    if restorable.initial is None:
        restored = await trainer.restore(str(restorable.folder))
        check_restored(restored, restorable.commit)
    policy = restorable.policy
    folder = to or root.export_at(policy.update)
    write = trainer.write_adapter if adapter else trainer.write_snapshot
    companions = None if adapter else model
    return await _export(folder, write, policy, companions, epoch, "commit", _nothing)


def weights_digest(receipt: ExportReceipt) -> str:
    """SHA-256 over names and checksums of the weights: equal for every export of one policy."""
    sha = hashlib.sha256()
    for name, checksum in sorted(receipt.checksums.items()):
        sha.update(f"{name}={checksum}\n".encode())
    return sha.hexdigest()


def export_damage(folder: Path, receipt: ExportReceipt) -> list[str]:
    """Say what is wrong with an export's files; empty when all are as its receipt says."""
    return damage_of([(entry, folder / entry.name) for entry in receipt.files])


def read_receipt(folder: Path) -> ExportReceipt | None:
    """The receipt of an export; None where there is none, or one that proves nothing."""
    data = atomic.read_bytes(folder / RECEIPT)
    try:
        return None if data is None else ExportReceipt.model_validate_json(data)
    except ValidationError:
        return None  # damaged, or of another version: the export is made anew


def _nothing() -> None:
    pass


async def _export(
    to: Path,
    write: Callable[[str], Awaitable[Written]],
    policy: PolicyId,
    model: Path | None,
    epoch: int,
    kind: Literal["trainer", "commit"],
    on_written: Callable[[], None],
) -> ExportReceipt:
    staging = to.with_name(f".{to.name}-e{epoch}.writing")
    try:
        with atomic.disk_full_as_error(to):
            await anyio.to_thread.run_sync(_begin, staging)
            written = await write(str(staging))
            on_written()
            describe = partial(
                ExportReceipt,
                policy=str(policy),
                update=policy.update,
                epoch=epoch,
                source=kind,
                num_tensors=written.num_tensors,
                num_bytes=written.num_bytes,
                checksums=dict(written.checksums),
            )
            receipt = await anyio.to_thread.run_sync(
                _finish, staging, to, written, model, lambda files: describe(files=files)
            )
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_discard, staging)
        raise
    _log.info(
        Event.EXPORT_FINISHED,
        policy=str(policy),
        path=str(to),
        num_tensors=receipt.num_tensors,
        num_bytes=receipt.num_bytes,
    )
    return receipt


def _begin(staging: Path) -> None:
    remove_folder(staging)
    atomic.point("mkdir", staging)
    staging.mkdir()


def _finish(
    staging: Path,
    to: Path,
    written: Written,
    companions: Path | None,
    describe: Callable[[tuple[FileEntry, ...]], ExportReceipt],
) -> ExportReceipt:
    """Everything from written weights to the folder under its final name; runs in a thread."""
    tensors = stored_tensors(staging)
    _check_equal(checksums_of(tensors), written, staging)
    if companions is not None:
        _copy_companions(companions, staging, {tensor.dtype for tensor in tensors})
    receipt = describe(seal([(p.name, p) for p in sorted(staging.iterdir())]))
    text = receipt.model_dump_json(indent=1).encode() + b"\n"
    atomic.write_bytes(staging / RECEIPT, text, durable=True)
    _put_in_place(staging, to)
    return receipt


def _check_equal(found: Mapping[str, str], written: Written, staging: Path) -> None:
    names = found.keys() | written.checksums.keys()
    wrong = sorted(n for n in names if found.get(n) != written.checksums.get(n))
    if wrong:
        raise PartialWrite(
            f"{len(wrong)} of {written.num_tensors} tensors do not read back equal: {wrong[:3]}",
            path=str(staging),
        )


def _copy_companions(model: Path, to: Path, dtypes: set[str]) -> None:
    """Copy config, tokenizer and the like, with the dtype that the weights really have."""
    weights = {path for pattern in _WEIGHTS for path in model.glob(pattern)}
    for path in sorted(model.iterdir()):
        if path.is_file() and path not in weights and path.name != RECEIPT:
            shutil.copyfile(path, to / path.name)
    config = to / _MODEL_CONFIG
    if len(dtypes) == 1 and config.exists():
        fields = json.loads(config.read_bytes())
        # Loaders cast to this dtype: with the old one they would round what was trained.
        fields.pop("torch_dtype", None)
        fields["dtype"] = dtypes.pop()
        config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _put_in_place(staging: Path, to: Path) -> None:
    """Rename; an older export of the same name makes way first and is deleted last."""
    old = to.with_name(f".{to.name}.replaced")
    atomic.fsync_folder(staging)
    remove_folder(old)
    if to.exists():
        atomic.point("rename", to)
        to.rename(old)
    atomic.point("rename", staging)
    staging.rename(to)
    atomic.fsync_folder(to.parent)
    remove_folder(old)


def _discard(staging: Path) -> None:
    with contextlib.suppress(OSError):
        remove_folder(staging)
