"""The points: where each lies, and what a fault there means.

The list is a contract in both directions: a test fails when a function named here holds no such
point, and when code has a point that is not named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One named point of production code."""

    name: str
    where: str
    """``module:function`` that passes it."""
    means: str
    """Which moment it is; where messages can be dropped or doubled there, which."""


_CHAIN = "runtime.rundir.atomic:write_new"
_FILE = "runtime.rundir.atomic:write_bytes"
_FILL = "runtime.rundir.atomic:_fill"
_PRODUCER = "runtime.rollout.producer:Producer."
_CALLS = "runtime.rollout.calls:GenerationCalls."
_GATE = "runtime.rollout.gate:AdmissionGate."
_SESSION = "runtime.session.sequence:Session."
_LOCAL = "runtime.launch.local:"
_SUBMITTING = "runtime.launch.submitting:"
_GUARD = "runtime.session.guard:Guard."
_ENDING = "runtime.session.ending:Ending."
_COMMIT = "runtime.checkpoints.commit:Committer."
_SWAP = "runtime.publication.swap:Swap."
_MONITOR = "runtime.engines.monitor:HealthMonitor."
_OWNER = "runtime.engines.embedded.owner:EmbeddedOwner."

FILE_POINTS: tuple[Point, ...] = (
    Point("*.write", _FILL, "a file's bytes are about to be written"),
    Point("*.fsync", _FILL, "they are written, not yet durable"),
    Point("*.link", _CHAIN, "durable under a temporary name, not yet under its own"),
    Point("*.replace", _FILE, "whole under a temporary name, the old content stands"),
    Point("*.fsync_folder", "runtime.rundir.atomic:fsync_folder", "the name is there, not durable"),
    Point("*.unlink", "runtime.rundir.atomic:_temporary", "the temporary name is still there"),
    Point("commit.mkdir", "runtime.checkpoints.commit:_fresh", "nothing of the commit is there"),
    Point("commit.rename", _COMMIT + "_seal", "all files are durable, their folder is not named"),
    Point("commit.fsync", "runtime.checkpoints.files:_fsync", "a state file is not yet durable"),
    Point("*.touch", "runtime.rundir.control:Control.request_retry", "a retry is being asked for"),
    Point("*.touch", "runtime.rundir.control:Control.attach", "a flow renews its attachment"),
    Point("*.unlink", "runtime.rundir.control:Control.take_retry", "a retry is being used up"),
)
"""File operations; the name's first part follows from the path (see ``plan.file_point``)."""

POINTS: tuple[Point, ...] = (
    Point("clock.time", "runtime.clock:SystemClock.time", "somebody looks at the wall clock"),
    # Launch
    Point(
        "launch.claim",
        "runtime.launch.attempts:win_or_attach",
        "all was looked at, the next attempt is not claimed",
    ),
    Point("launch.freeze", _LOCAL + "LocalLaunch._begin", "claimed, nothing else of it written"),
    Point("launch.spawn", _LOCAL + "LocalLaunch._begin", "written down, its guard is not started"),
    Point("launch.record", _LOCAL + "_record", "its guard is there, and nobody can know which"),
    Point("launch.go", _LOCAL + "_record", "its guard is recorded, and not let go"),
    Point("launch.started", _LOCAL + "LocalLaunch._begin", "its guard goes on, nobody was told"),
    Point("launch.receipt", _SUBMITTING + "_send", "its number is taken, no receipt says so"),
    Point("launch.send", _SUBMITTING + "_send", "its receipt is there, its job is not sent"),
    Point("launch.sent", _SUBMITTING + "_send", "sent, and its receipt names no job"),
    Point("launch.follow", _SUBMITTING + "_send", "its receipt is whole, nobody was told"),
    # Control
    Point("control.read", "runtime.rundir.control:Control.stop_request", "dropped: not seen yet"),
    # Producer and its requests: every await
    Point("producer.admit", _PRODUCER + "_admit_for_ever", "nothing more may be admitted now"),
    Point("producer.tick", _PRODUCER + "_tick_for_ever", "time is about to be looked at"),
    Point("producer.take", _PRODUCER + "take", "the trainer waits for a collection"),
    Point("producer.close", _PRODUCER + "close", "what is in flight is being cancelled"),
    Point("producer.group", _PRODUCER + "_fly", "a group begins"),
    Point("producer.land", _PRODUCER + "_land", "a group was joined; doubled: told twice"),
    Point("group.generated", "runtime.rollout.flight:make_group", "samples are there, no rewards"),
    Point("generation.slot", _CALLS + "complete", "a request waits for slots and admission"),
    Point("generation.request", _CALLS + "_ask", "dropped: the request is lost on its way"),
    Point("generation.answer", _CALLS + "_ask", "dropped: it ran, and its answer is lost"),
    Point("generation.abort", _CALLS + "_to_the_end", "answers are there, partial ones too"),
    Point("generation.wait", _CALLS + "_newer_than", "a partial response waits for a publication"),
    Point("generation.continue", _CALLS + "_go_on", "it goes on under the new policy"),
    Point("group.gather", "runtime.rollout.requests:gather", "siblings are about to be sent"),
    # Gate
    Point("gate.enter", _GATE + "enter", "a call asks to be let in"),
    Point("gate.close", _GATE + "close", "the gate shuts and drains"),
    Point("gate.open", _GATE + "open", "the gate opens"),
    Point("gate.evaluation", _GATE + "evaluation", "evaluation is about to have the engines"),
    Point("gate.publication", _GATE + "publication", "a publication has its turn"),
    # Session
    Point("session.open", _SESSION + "_open", "nothing is published yet"),
    Point("session.initial", _SESSION + "_commit_initial", "commit 0 is about to be made"),
    Point("session.collect", _SESSION + "_collect", "between two collections"),
    Point("session.train", _SESSION + "_train_on", "a collection is taken, not trained on"),
    Point("session.trained", _SESSION + "_train_on", "trained on, not marked consumed"),
    Point("session.boundary", _SESSION + "_boundary", "consumed, not staged"),
    Point("session.stage", _SESSION + "_stage", "the state is about to be copied"),
    Point("session.publish", _SESSION + "_publish", "staged, not published"),
    Point("session.evaluate", _SESSION + "_evaluate", "published, not evaluated"),
    Point("session.leave", _SESSION + "_leave", "the loop is over"),
    Point("session.settle", _SESSION + "_commit_at_end", "the last commit is about to be settled"),
    Point("session.outcome", "runtime.session.driver:main", "all is done, the last words are not"),
    # Commit
    Point("commit.begin", _COMMIT + "_commit", "a state is copied, none of it is written"),
    Point("commit.save", "runtime.trainer.torch.staging:Staging.write", "tensors are durable"),
    Point("commit.record", _COMMIT + "_append", "everything is durable but the record"),
    Point("commit.recorded", _COMMIT + "_commit", "the record stands, nobody was told"),
    Point("ledger.segment", _COMMIT + "_write_segment", "the folder is there, the ledger is not"),
    # Guard
    Point("guard.lease", _GUARD + "_own", "the lease is held, the epoch is not taken"),
    Point("guard.epoch", _GUARD + "_take_epoch", "the epoch is about to be taken"),
    Point("guard.announce", _GUARD + "_announce", "taken, and no process knows"),
    Point("guard.session", _GUARD + "_start_session", "the session is about to start"),
    Point("guard.watch", _GUARD + "_watch", "between two looks at session and lease"),
    Point("guard.end", _ENDING + "_append", "the session has exited, no end record stands"),
    Point("guard.finish", _ENDING + "_write", "the end record stands, the view is older"),
    # Publication
    Point("publication.prepare", _SWAP + "prepare", "engines serve, no snapshot is there"),
    Point("publication.drain", _SWAP + "drain", "running requests are about to end"),
    Point("publication.turn", _SWAP + "one_by_one", "rolling: some engines are at it already"),
    Point("publication.rest", _SWAP + "draining", "rolling: one engine gets no new work"),
    Point("publication.pause", _SWAP + "pause", "engines still decode"),
    Point("publication.transfer", _SWAP + "transfer", "paused, the old weights are in place"),
    Point(
        "publication.bucket",
        "runtime.publication.broadcast:BroadcastTransport._send",
        "a bucket is about to be sent, and engines may already wait for it",
    ),
    Point("publication.verify", _SWAP + "verify", "new weights are in place, unverified"),
    Point("publication.set_policy", _SWAP + "set_policy", "verified, under the old name"),
    Point("publication.kill", _SWAP + "kill_failed", "decided, unverified engines still live"),
    Point("publication.resume", _SWAP + "resume", "decided, nothing goes on yet"),
    Point(
        "publication.record",
        "runtime.publication.transaction:Publisher._record",
        "done, not written down",
    ),
    # Engines
    Point("engine.start", _MONITOR + "_join", "a server is about to be started"),
    Point(
        "engine.probe", "runtime.engines.health:shows_life", "dropped: the probe's answer is lost"
    ),
    Point("engine.bury", _MONITOR + "_bury", "declared dead, its process is not gone"),
    Point("engine.restart", _MONITOR + "_restart", "a dead slot is about to start again"),
    Point("engine.state", "runtime.engines.pool:EnginePool._move", "a slot changes its state"),
    Point("engine.spawn", _OWNER + "start", "its owner is about to start the server"),
    Point("engine.end", _OWNER + "_end", "its owner is about to end the server"),
)
"""Every other point, by name."""
