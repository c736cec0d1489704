"""Where blows fall that meet a run at one of its fault points."""

from __future__ import annotations

from runtime.faults.points import POINTS

FIRST = (
    "guard.lease", "guard.epoch", "guard.announce", "guard.session", "session.open",
    "session.initial", "engine.start", "engine.spawn", "engine.state", "commit.mkdir",
    "commit.begin", "commit.rename", "commit.record", "commit.recorded", "ledger.segment",
    "chain.write", "chain.fsync", "chain.link", "chain.fsync_folder", "attempt.write",
    "view.replace", "publication.resume", "publication.record",
)  # fmt: skip
"""Points of a run's beginning: some of them are passed only there."""
LAST = (
    "producer.close", "session.leave", "session.settle", "session.outcome", "guard.end",
    "guard.finish", "export.mkdir", "export.rename", "evaluation.write", "evaluation.link",
)  # fmt: skip
"""Points of its end."""
_SELDOM = {
    "clock.time", "control.read", "launch.receipt", "launch.send", "launch.sent", "launch.follow",
    "engine.probe", "generation.wait", "generation.continue",
    "publication.bucket", "publication.drain", "publication.kill", "publication.rest",
    "publication.turn", "session.initial",
}  # fmt: skip
"""Passed only by runs of other kinds, or made for other faults than a kill."""
PROVOKED = {
    "guard.lease": "session",
    "guard.epoch": "session",
    "guard.announce": "session",
    "guard.session": "session",
    "guard.end": "session",
    "guard.finish": "session",
    "session.open": "session",
    "engine.start": "engine server",
    "engine.spawn": "engine server",
    "engine.bury": "engine server",
    "engine.restart": "engine server",
    "engine.state": "engine server",
    "engine.end": "engine server",
    "launch.claim": "session",
    "launch.freeze": "session",
    "launch.spawn": "session",
    "launch.record": "session",
    "launch.go": "session",
    "launch.started": "session",
    "attempt.write": "session",
    "attempt.replace": "session",
}
"""Points that a healthy run does not pass, and whose death leads there."""
STEADY = tuple(p.name for p in POINTS if p.name not in {*_SELDOM, *LAST[:4]})
FILE_KILLS = (
    "chain.write", "chain.fsync", "chain.link", "chain.fsync_folder", "chain.unlink",
    "commit.mkdir", "commit.fsync", "commit.rename", "commit.fsync_folder", "ledger.write",
    "ledger.fsync", "ledger.replace", "ledger.fsync_folder", "attempt.write", "attempt.replace",
    "view.write", "view.replace", "control.touch", "rollout.write",
)  # fmt: skip
TORN = ("commit.save", "commit.fsync", "ledger.fsync", "chain.fsync", "view.replace")
FULL = (
    "commit.mkdir", "commit.save", "commit.fsync", "ledger.write", "chain.write", "chain.link",
    "view.write", "rollout.write",
)  # fmt: skip
SLOW = (
    "producer.take", "producer.group", "generation.request", "generation.answer", "session.train",
    "session.trained", "session.stage", "commit.begin", "commit.record", "commit.save",
    "publication.transfer", "publication.set_policy", "publication.resume", "gate.publication",
    "guard.watch", "engine.probe",
)  # fmt: skip
HANGS = ("generation.request", "generation.answer", "producer.group", "group.generated")
DROPS = ("generation.request", "generation.answer", "engine.probe", "control.read")

POINTS_OF: dict[str, tuple[str, ...]] = {
    "kill at a point": tuple(dict.fromkeys((*STEADY, *FILE_KILLS, *FIRST, *LAST))),
    "torn write": TORN,
    "disk full": FULL,
    "slow": SLOW,
    "hang": HANGS,
    "drop": DROPS,
    "duplicate": ("producer.land",),
    "clock jump": ("clock.time",),
    "two flows": ("attempt.link", "launch.claim"),
}
"""Where each blow that meets a point can meet the run."""
