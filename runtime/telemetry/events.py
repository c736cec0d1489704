"""Every event name with what it says. A contract: names are added, never renamed.

``noun.past_tense``; data goes into keys. A span is the pair ``x.started`` and ``x.finished`` or
``x.failed`` with one ``span_id``. ``docs/operations.md`` shows this table (``python -m
runtime.telemetry.reference``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Event(StrEnum):
    """The name as it stands in logs; ``sentence`` explains it."""

    sentence: str

    def __new__(cls, name: str, sentence: str) -> Self:
        """A member is its name; the sentence rides along."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.sentence = sentence
        return member

    # The run and its processes
    RUN_PREPARED = "run.prepared", "Model, data and verifiers stand frozen under prepared/."
    RUN_COMPLETED = "run.completed", "The run's end was reached; ended_by says which one."
    RUN_STOPPED = (
        "run.stopped",
        "Ended resumable because somebody asked; `milepost resume` goes on.",
    )
    RUN_PARKED = (
        "run.parked",
        "Ended resumable because nobody attended to it; the hardware is free.",
    )
    RUN_FAILED = "run.failed", "A fatal error ended it; failure and next_check say where to look."
    ATTEMPT_PREEMPTED = (
        "attempt.preempted",
        "The scheduler asked for the hardware; a commit comes first.",
    )
    ATTEMPT_ENDED = "attempt.ended", "The guard wrote the end record of its epoch."
    LAUNCH_UNNOTED = (
        "launch.unnoted",
        "A receipt could not keep what its scheduler told; the job is followed all the same.",
    )
    EPOCH_TAKEN = (
        "epoch.taken",
        "This guard owns the run from now on; older owners can write nothing.",
    )
    SESSION_STARTED = (
        "session.started",
        "Ledger, producer, trainers and engines are being brought up.",
    )
    SESSION_READY = "session.ready", "Every engine is verified; the first prompt may be admitted."
    SESSION_HELD = (
        "session.held",
        "A step failed beyond its retries; all stays in memory, and admission is shut.",
    )
    SESSION_RELEASED = (
        "session.released",
        "A retry file let the held step try once more; engines have all their restarts again.",
    )
    SESSION_ENDED = "session.ended", "The session has closed its trainers and engines."
    STEP_RETRIED = "step.retried", "A step failed and is tried again by the session."
    STAGE_STARTED = "stage.started", "A timed stage of the loop began."
    STAGE_FINISHED = "stage.finished", "It ended; the row is in driver_timing.jsonl."
    STAGE_FAILED = "stage.failed", "It raised; the error follows from whoever called it."
    WAIT_SLOW = "wait.slow", "A wait takes long; it says for what, and until when."

    # Data, rollouts
    GROUP_REQUEUED = (
        "group.requeued",
        "An attempt was given up; the pristine prompt is at the head.",
    )
    GROUP_UNJOINED = (
        "group.unjoined",
        "An attempt was settled while requests of it were still out: its siblings were not joined.",
    )
    TEACHER_CHECKED = (
        "teacher.checked",
        "A teacher's server reads text as the student does; its vocabulary, where it tells.",
    )
    TEACHER_RETRIED = (
        "teacher.retried",
        "A teacher's server did not score a response; it is asked again, or the group goes back.",
    )
    GROUP_SKIPPED = "group.skipped", "The verifier failed twice; charged to reward.skip_budget."
    ROLLOUT_STOPPED = (
        "rollout.stopped",
        "The stop rule: half of all attempts failed for five minutes.",
    )
    GENERATION_PAUSED = "generation.paused", "The gate is shut for training calls."
    GENERATION_RESUMED = "generation.resumed", "The gate is open; what waited kept its place."
    REQUEST_FAILED = (
        "request.failed",
        "A generation request failed; its class decides what follows.",
    )
    VERIFIER_FAILED = "verifier.failed", "A verifier crashed, hung or returned no number."
    VERIFIER_UNREAPED = "verifier.unreaped", "A killed worker has not gone yet; it is left behind."

    # Engines, publication
    ENGINE_STARTING = "engine.starting", "A server is still on its way up; its last line is told."
    ENGINE_STARTED = "engine.started", "A server answers; it gets no traffic before a publication."
    ENGINE_SLOTS_FEWER = "engine.slots_fewer", "Memory left fewer slots than asked for."
    ENGINE_VERIFIED = "engine.verified", "Its weights were proved to be the published policy's."
    ENGINE_SUSPECTED = "engine.suspected", "A health probe was missed."
    ENGINE_RECOVERED = "engine.recovered", "A suspected engine answered again."
    ENGINE_DIED = "engine.died", "The engine is gone; its groups are requeued."
    ENGINE_DECODER_FAILED = "engine.decoder_failed", "The embedded decoder raised; the engine ends."
    ENGINE_RESTARTED = "engine.restarted", "A slot has a new incarnation."
    ENGINE_STOPPED = "engine.stopped", "The embedded server closed its door and left."
    ENGINE_REQUEST_FAILED = "engine.request_failed", "A request raised inside the embedded server."
    ENGINE_SLEPT = "engine.slept", "A sleeping engine has given its GPU memory back."
    ENGINE_WOKEN = (
        "engine.woken",
        "It has its memory again; a publication fills it.",
    )
    ENGINE_RETIRED = "engine.retired", "A slot used up its restarts, or the run is ending."
    PUBLICATION_STEP_STARTED = (
        "publication.step_started",
        "With diagnostics on: one step of one rank or engine began.",
    )
    PUBLICATION_STEP_FINISHED = "publication.step_finished", "It ended; elapsed_s says when."
    PUBLICATION_STEP_FAILED = "publication.step_failed", "It raised; error says what."
    PUBLICATION_STARTED = "publication.started", "Weights of the named policy go to the engines."
    PUBLICATION_COMMITTED = "publication.committed", "At least one engine was verified at it."
    PUBLICATION_RECORD_DROPPED = (
        "publication.record_dropped",
        "A decision record could not be written; the publication itself stands.",
    )
    PUBLICATION_KILL_FAILED = (
        "publication.kill_failed",
        "An engine that did not resume could not be ended; it gets no traffic.",
    )
    PUBLICATION_FAILED = "publication.failed", "No engine was verified; the old policy stays."
    PUBLICATION_GROUP_LEFT_BEHIND = (
        "publication.group_left_behind",
        "A broken collective group could not be destroyed; a new one takes its place.",
    )

    # Training, contracts
    TRAINER_STARTED = "trainer.started", "All trainer ranks hold the weights."
    UPDATE_FINISHED = "update.finished", "One collection was trained on."
    CONTRACT_VIOLATED = "contract.violated", "State that must not be trained on; numbers are here."

    # Commits, evaluation, export
    CHECKPOINT_COMMITTED = "checkpoint.committed", "The commit record stands in the chain."
    CHECKPOINT_FAILED = (
        "checkpoint.failed",
        "Files could not be written; the next boundary tries anew.",
    )
    CHECKPOINT_RESTORED = "checkpoint.restored", "Trainer and ledger stand at this commit."
    CHECKPOINT_LEFTOVER = "checkpoint.leftover", "A folder could not be deleted; it is harmless."
    CHECKPOINT_DELETED = "checkpoint.deleted", "Retention removed a checkpoint."
    CHECKPOINT_UPLOADED = "checkpoint.uploaded", "Its copy in the object store is whole."
    CHECKPOINT_UPLOAD_FAILED = (
        "checkpoint.upload_failed",
        "The object store did not take it; the next commit, or `milepost upload`, brings it along.",
    )
    CHECKPOINT_REWIND_KNOWN = (
        "checkpoint.rewind_known",
        "The object store knows what this epoch undid; nothing of it was made before.",
    )
    CHECKPOINT_FETCHED = (
        "checkpoint.fetched",
        "A root without history was filled from the object store.",
    )
    EVALUATION_STARTED = "evaluation.started", "A set is being generated and judged."
    EVALUATION_FINISHED = "evaluation.finished", "A result stands; metrics are here."
    EVALUATION_FAILED = "evaluation.failed", "Counts done, failed, untried, by error class."
    EVALUATION_VOIDED = (
        "evaluation.voided",
        "An attempt went on past a final evaluation that had not started.",
    )
    EXPORT_FAILED = "export.failed", "No export could be written; the run ends without it."
    EXPORT_FINISHED = "export.finished", "A Hugging Face folder stands, verified."

    # Compiler caches
    CACHE_RESTORED = "cache.restored", "Compiled kernels came from the archive; files by part."
    CACHE_PUBLISHED = "cache.published", "What became of each part; the run's result is the same."
    CACHE_FAILED = (
        "cache.failed",
        "Caches could not be restored or published; the run does without.",
    )

    # Telemetry about itself
    ROWS_DROPPED = "rows.dropped", "The disk takes no rows of this file; they are counted."
    ROWS_RESUMED = "rows.resumed", "It takes them again; num_dropped are missing."
    OCCUPANCY_MISSED = (
        "occupancy.missed",
        "A sample could not be taken: missing coverage, not zero.",
    )
    TRACKING_STARTED = "tracking.started", "The tracking run is open; mode and run id."
    TRACKING_FELL_BACK = (
        "tracking.fell_back",
        "Online tracking was impossible; offline files instead.",
    )
    TRACKING_FAILED = "tracking.failed", "Tracking gets no more rows; metrics.jsonl has them all."
    TRACKING_ABANDONED = "tracking.abandoned", "Tracking did not finish in time and was cut off."
    TRACKING_ENDED = "tracking.ended", "The tracking run is closed; counts sent and dropped."
    LIBRARY_WARNED = "library.warned", "Another library logged a warning or an error."
