"""GPU figures in launch receipts: for people, and never in anybody's way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runtime.errors import DiskFull
from runtime.launch.receipts import LaunchReceipt, Receipts
from runtime.launch.submission import attempt_key
from runtime.rundir import atomic


@pytest.fixture
def receipts(tmp_path: Path) -> Receipts:
    return Receipts(tmp_path / "receipts")


@pytest.fixture
def sent(receipts: Receipts, tmp_path: Path) -> LaunchReceipt:
    """Written before the call went out; its answer has not come yet."""
    receipt = LaunchReceipt(
        key=attempt_key("run", tmp_path, 1), run="run", root=str(tmp_path), attempt=1,
        backend="beaker", cluster=None, spec_digest="s", training_digest="t", image=None,
        revision=None, dirty=False, active_gpus=3, time=0.0,
    )  # fmt: skip
    receipts.write(receipt)
    return receipt


def read(receipts: Receipts, receipt: LaunchReceipt) -> LaunchReceipt | None:
    return receipts.read(receipt.run, Path(receipt.root), receipt.attempt)


def test_what_another_process_wrote_since_the_reading_stays(
    receipts: Receipts, sent: LaunchReceipt
) -> None:
    answered = sent.model_copy(update={"job": "ex1", "active_gpus": 8})
    receipts.write(answered)
    noted = receipts.note_gpus(sent, active=4, allocated=9)
    assert noted == answered.model_copy(update={"allocated_gpus": 9})
    assert read(receipts, sent) == noted


def test_what_was_taken_back_is_not_written_again(receipts: Receipts, sent: LaunchReceipt) -> None:
    receipts.remove(sent)
    noted = receipts.note_gpus(sent, active=4, allocated=None)
    assert (noted.active_gpus, noted.allocated_gpus) == (4, None)
    assert read(receipts, sent) is None


@pytest.mark.parametrize(
    "error",
    [
        DiskFull("no space", path="x"),
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    ],
)
@pytest.mark.parametrize("what", ["read_bytes", "write_bytes"])
def test_figures_that_cannot_be_kept_are_told_all_the_same(
    receipts: Receipts,
    sent: LaunchReceipt,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    what: str,
) -> None:
    with monkeypatch.context() as broken:

        def fails(*_: object, **__: object) -> bytes:
            raise error

        broken.setattr(atomic, what, fails)
        noted = receipts.note_gpus(sent, active=8, allocated=9)
    assert (noted.active_gpus, noted.allocated_gpus) == (8, 9)
    assert read(receipts, sent) == sent
    assert capsys.readouterr().out == ""  # `--json` speaks there
