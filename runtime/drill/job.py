"""The short job of a drill: seconds of training, in two variants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.load import LoadedRun, load_run
from runtime.rundir.layout import RunRoot

Variant = Literal["deterministic", "ahead", "rolling"]
"""``deterministic``: every update follows from the run file alone, so an undisturbed run is the
measure; ``ahead``: two engines, responses over several policies, exact in its accounting;
``rolling``: the same with engine-by-engine publication."""

VARIANTS: tuple[Variant, ...] = ("deterministic", "ahead", "deterministic", "rolling")
"""By turns, from the first run on."""

LEASE_S = 15.0
"""Of a drilled run: short, so that a freeze outlasts it in seconds."""

_VERIFIER = '''
def score(response, answer, metadata):
    """Something a model without a warm-up can differ in: the share of lower-case letters."""
    return sum(c.islower() for c in response) / max(1, len(response))
'''

_RUN_FILE = """
name = "drill"
seed = 3

[model]
path = "{made}/model"
dtype = "float32"

[data]
train = "{made}/train.jsonl"
epochs = 4
max_prompt_tokens = 32

[rollout]
seed = 17
groups_per_collection = 4
samples_per_prompt = 2
max_response_tokens = 6
waiting_deadline = "20s"
running_deadline = "20s"
drain_deadline = "20s"

[reward]
verifier = "letters:score"
workers = 1

[core]
lr = 1e-3
activation_checkpointing = false
max_tokens_per_gpu = 4096
max_updates = {updates}
tis = false
publication_mode = "{mode}"
publication_transport = "disk"

[checkpoint]
every_updates = 2

[evaluation]
every_updates = 4

[evaluation.sets.held]
prompts = "{made}/holdout.jsonl"

[session]
retries = 4
retry_backoff = "0.2s"

[health]
interval = "1s"
timeout = "5s"
misses = 2
restarts_per_hour = 1000

[launch]
detach_grace = "120s"

[output]
root = "run"
export_hf = true

[tracking]
mode = "disabled"
"""

_VARIANTS: dict[Variant, str] = {
    # One engine, in step with the trainer, one request at a time: nothing depends on timing.
    "deterministic": "\n[async]\nmax_staleness = 0\n",
    "ahead": "\n[async]\nmax_staleness = 1\n",
    "rolling": "\n[async]\nmax_staleness = 1\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run file in a folder of its own."""

    file: Path
    variant: Variant
    updates: int

    @property
    def root(self) -> RunRoot:
        """Where the run lies."""
        return RunRoot(self.file.parent / "run")

    @property
    def attended(self) -> Path:
        """What its attendants saw and did, a row each."""
        return attended(self.file)

    def load(self) -> LoadedRun:
        """The run file."""
        return load_run(self.file, ())


def attended(file: Path) -> Path:
    """Where the attendants of a run file keep their record."""
    return file.with_name("attendant.jsonl")


def make_ground(folder: Path) -> Path:
    """Model and prompts of all runs of a drill; idempotent. Loads torch."""
    from runtime.recipes import laptop

    laptop.make(folder / "made", seed=3, prompts=280, holdout=4, warm_up_until=None)
    return folder / "made"


def make_job(folder: Path, made: Path, variant: Variant, *, updates: int) -> Job:
    """Write the files of one run; ``folder`` is new."""
    folder.mkdir(parents=True)
    (folder / "letters.py").write_text(_VERIFIER)
    engines = 1 if variant == "deterministic" else 2
    slots = 1 if variant == "deterministic" else 16
    mode = "rolling" if variant == "rolling" else "refresh"
    text = _RUN_FILE.format(made=made, updates=updates, mode=mode).replace(
        "[rollout]\n", f"[rollout]\nengines = {engines}\nmax_running_requests = {slots}\n"
    )
    file = folder / "run.toml"
    file.write_text(text + _VARIANTS[variant])
    return Job(file=file, variant=variant, updates=updates)
