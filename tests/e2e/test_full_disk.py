"""No room for a checkpoint at the end of the data: held, and complete once a person made room."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system"),
]

SIZE = 10 << 20
PROMPTS = 10


def test_full_disk_at_the_end_of_the_data_is_held_and_made_good(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    lines = Path(run.train_file).read_text().splitlines(keepends=True)[:PROMPTS]
    few = run.file.parent / "few.jsonl"
    few.write_text("".join(lines))
    run.root.path.mkdir()
    with small_disk(run.root.checkpoints) as filler:
        run.start_prepared(f'data.train="{few}"', "evaluation.every_updates=100")
        held = run.until_held()
        assert held.failure.error_class == "DiskFull"
        assert held.failure.step == "checkpoint/3"
        assert [c.update for c in run.commits] == [0]
        assert run.view.activity == "held"
        filler.unlink()
        run.retry(held)
        run.finish()
        # The last collection was short: two groups instead of four.
        assert (run.end.ended_by, run.epoch) == ("data", 1)
        assert [c.update for c in run.commits] == [0, 3]
        assert_whole(run, updates=3, consumed=PROMPTS)
        assert run.ledger().remaining == 0


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own with no room for a checkpoint, until the yielded file is deleted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        filler = folder / ".filler"
        filler.write_bytes(bytes(SIZE - (1 << 20)))
        yield filler
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
