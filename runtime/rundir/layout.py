"""Where everything lies in an output root."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

EXPORT_RECEIPT = "milepost.json"
"""Lies in a finished export, beside the weights it proves."""

CODE = "code"
"""In an attempt's folder: the code that travelled with its job, where no image holds it."""

_ATTEMPT = re.compile(r"[1-9]\d*")


@dataclass(frozen=True, slots=True)
class RunRoot:
    """The output root of one run; only names are made here, ``create`` alone touches files."""

    path: Path
    """Absolute; shared by all hosts of the run where there are several."""

    @classmethod
    def of(cls, path: Path | str) -> RunRoot:
        """The root at ``path``, made absolute without following links."""
        return cls(Path(path).absolute())

    def create(self) -> None:
        """Make the folders that several rooms write into. Idempotent."""
        for folder in (self.chain, self.control, self.receipts, self.attempts):
            folder.mkdir(parents=True, exist_ok=True)

    # -- what was asked -------------------------------------------------------------------------

    @property
    def plan(self) -> Path:
        """The plan of the newest attempt, as JSON."""
        return self.path / "plan.json"

    @property
    def run(self) -> Path:
        """The resolved run file of the newest attempt, as JSON."""
        return self.path / "run.json"

    # -- history, ownership, view ---------------------------------------------------------------

    @property
    def chain(self) -> Path:
        """History: one file per record."""
        return self.path / "chain"

    @property
    def control(self) -> Path:
        """What people and flows ask of the session."""
        return self.path / "control"

    @property
    def lease(self) -> Path:
        """The marker of the owner; nobody deletes it by hand."""
        return self.path / "owner.lease"

    @property
    def workflow(self) -> Path:
        """The view of where the run stands."""
        return self.path / "workflow.json"

    @property
    def journal(self) -> Path:
        """What happened, a row each."""
        return self.path / "journal.jsonl"

    @property
    def receipts(self) -> Path:
        """Receipts of steps that no other file proves."""
        return self.path / "receipts"

    # -- attempts -------------------------------------------------------------------------------

    @property
    def attempts(self) -> Path:
        """A folder per attempt."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        """The folder of one attempt (from 1)."""
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """Attempts that have a folder, ascending; a folder alone claims nothing."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if _ATTEMPT.fullmatch(p.name))

    # -- what a run makes -----------------------------------------------------------------------

    @property
    def prepared(self) -> Path:
        """What the model is, the frozen data, which verifier at which version."""
        return self.path / "prepared"

    @property
    def rollouts(self) -> Path:
        """Files per collection."""
        return self.path / "rollouts"

    def collection_stem(self, collection: int, epoch: int) -> Path:
        """Common stem of a collection's files, ``rollouts/000012-e3``."""
        return self.rollouts / f"{collection:06d}-e{epoch}"

    @property
    def checkpoints(self) -> Path:
        """A folder per commit."""
        return self.path / "checkpoints"

    def checkpoint(self, update: int, epoch: int) -> Path:
        """The folder of a commit, ``checkpoints/000050-e3``."""
        return self.checkpoints / f"{update:06d}-e{epoch}"

    def gpu_usage(self, rank: int) -> Path:
        """Samples of GPU use on one node."""
        return self.checkpoints / f"gpu_usage_node{rank}.jsonl"

    @property
    def evaluations(self) -> Path:
        """Requests, tries and results by policy and set."""
        return self.path / "evaluations"

    def evaluation(self, policy: str, set_name: str) -> Path:
        """The folder of one evaluation."""
        return self.evaluations / policy / set_name

    @property
    def snapshots(self) -> Path:
        """Exports that background evaluations read, a folder per policy id."""
        return self.path / "snapshots"

    @property
    def export(self) -> Path:
        """The final HF export."""
        return self.path / "export"

    def export_at(self, update: int) -> Path:
        """An export other than the final one."""
        return self.path / f"export-{update}"

    @property
    def contracts(self) -> Path:
        """What a broken contract left for the reader."""
        return self.path / "contracts"

    @property
    def wandb(self) -> Path:
        """Offline files, or id and state of the online run."""
        return self.path / "wandb"

    @property
    def driver_timing(self) -> Path:
        """A row per stage."""
        return self.path / "driver_timing.jsonl"

    @property
    def pipeline_occupancy(self) -> Path:
        """How full the pipeline was."""
        return self.path / "pipeline_occupancy.jsonl"

    @property
    def pipeline_lifecycle(self) -> Path:
        """What happened to each group."""
        return self.path / "pipeline_lifecycle.jsonl"

    @property
    def rollout_errors(self) -> Path:
        """Serving and verifier failures, a row each."""
        return self.path / "rollout_errors.jsonl"

    @property
    def health(self) -> Path:
        """Captures and verdicts."""
        return self.path / "health"

    @property
    def reports(self) -> Path:
        """Reports for people."""
        return self.path / "reports"

    def artifacts(self) -> dict[str, str]:
        """Real paths of all artifacts by name; tools take them from ``workflow.json``."""
        names = (
            "plan", "run", "chain", "control", "journal", "prepared", "rollouts", "checkpoints",
            "evaluations", "export", "contracts", "wandb", "driver_timing", "pipeline_occupancy",
            "pipeline_lifecycle", "rollout_errors", "attempts", "health", "reports",
        )  # fmt: skip
        return {name: str(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The folder of one attempt, ``attempts/<n>``."""

    path: Path

    @property
    def number(self) -> int:
        """Which attempt this is, from 1."""
        return int(self.path.name)

    @property
    def root(self) -> RunRoot:
        """The output root it lies in."""
        return RunRoot(self.path.parent.parent)

    @property
    def claim(self) -> Path:
        """Created exclusively: who launches this attempt, and of what."""
        return self.path / "claim.json"

    @property
    def started(self) -> Path:
        """The guard's process, written by a local launcher."""
        return self.path / "started.json"

    @property
    def attempt(self) -> Path:
        """What the guard is to do."""
        return self.path / "attempt.json"

    @property
    def run(self) -> Path:
        """The frozen, resolved run file of this attempt."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The frozen plan of this attempt."""
        return self.path / "plan.json"

    @property
    def guard(self) -> Path:
        """What the guard tells its processes: epoch and dead-man's switch."""
        return self.path / "guard.json"

    @property
    def outcome(self) -> Path:
        """The session's own last words."""
        return self.path / "outcome.json"

    @property
    def turned_away(self) -> Path:
        """A guard left without having owned the run; removed by the next guard of the attempt."""
        return self.path / "turned-away.json"

    @property
    def processes(self) -> Path:
        """Every process of the attempt, entered before its exec."""
        return self.path / "processes.jsonl"

    @property
    def reserve(self) -> Path:
        """Space that is freed to write the failure record."""
        return self.path / "reserve"

    @property
    def code(self) -> Path:
        """Code that travelled with the job; absent where an image or a checkout holds it."""
        return self.path / CODE

    @property
    def guard_log(self) -> Path:
        """Output of the guard."""
        return self.path / "guard.log"

    @property
    def session_log(self) -> Path:
        """Output of the session."""
        return self.path / "session.log"

    def epoch(self, epoch: int) -> Path:
        """The folder of one epoch within the attempt (``head.json`` of the rendezvous)."""
        return self.path / f"e{epoch}"
