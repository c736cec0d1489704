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
    RUN_STARTED = "run.started", "Training goes on from the commit named here; 0 is a fresh start."
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
    RUN_REWOUND = (
        "run.rewound",
        "A new epoch restored an older update; rows beyond it are superseded.",
    )
    ATTEMPT_SUBMITTED = "attempt.submitted", "A launch backend took the attempt."
    ATTEMPT_STARTED = "attempt.started", "The guard of this attempt runs."
    ATTEMPT_ATTACHED = "attempt.attached", "A flow began to poll this attempt."
    ATTEMPT_DETACHED = "attempt.detached", "Nobody has polled for a while; detach_grace counts."
    ATTEMPT_PREEMPTED = (
        "attempt.preempted",
        "The scheduler asked for the hardware; a commit comes first.",
    )
    ATTEMPT_ENDED = "attempt.ended", "The guard wrote the end record of its epoch."
    EPOCH_TAKEN = (
        "epoch.taken",
        "This guard owns the run from now on; older owners can write nothing.",
    )
    EPOCH_FENCED = (
        "epoch.fenced",
        "A newer owner exists; this process stops and writes nothing more.",
    )
    LEASE_TAKEN = "lease.taken", "This process may try to own the run."
    LEASE_REFUSED = "lease.refused", "Another process holds the lease: host, pid, attempt, age."
    LEASE_LOST = "lease.lost", "The lease lapsed or was taken; every process of the attempt leaves."
    PROCESS_SPAWNED = "process.spawned", "A child was entered in processes.jsonl and started."
    PROCESS_EXITED = "process.exited", "A child ended; exit code or signal."
    PROCESS_REAPED = "process.reaped", "A process that an older attempt left behind was ended."
    SESSION_STARTED = (
        "session.started",
        "Ledger, producer, trainers and engines are being brought up.",
    )
    SESSION_READY = "session.ready", "Every engine is verified; the first prompt may be admitted."
    SESSION_HELD = (
        "session.held",
        "A step failed beyond its retries; all stays in memory for a retry.",
    )
    SESSION_RELEASED = "session.released", "A retry file let the held step try once more."
    SESSION_ENDED = "session.ended", "The session has closed its trainers and engines."
    SESSION_LOST = "session.lost", "The session ended without its last words; see its log's end."
    STEP_STARTED = "step.started", "A committed step (segment, checkpoint, evaluation) began."
    STEP_RETRIED = "step.retried", "A step failed and is tried again by the session."
    STEP_FINISHED = "step.finished", "A step stands."
    STEP_FAILED = "step.failed", "A step failed; retry says who may try again."
    STAGE_STARTED = "stage.started", "A timed stage of the loop began."
    STAGE_FINISHED = "stage.finished", "It ended; the row is in driver_timing.jsonl."
    STAGE_FAILED = "stage.failed", "It raised; the error follows from whoever called it."
    WAIT_SLOW = "wait.slow", "A wait takes long; it says for what, and until when."
    WAIT_EXPIRED = "wait.expired", "A deadline passed; waiting_for says what never came."
    CONTROL_RECEIVED = "control.received", "A control file was seen: stop, stop-final or retry."

    # Data, rollouts
    GROUP_ADMITTED = "group.admitted", "A prompt went in flight as a whole group."
    GROUP_FINISHED = "group.finished", "All samples of a group are generated and judged."
    GROUP_REQUEUED = (
        "group.requeued",
        "An attempt was given up; the pristine prompt is at the head.",
    )
    GROUP_FILTERED = "group.filtered", "A filter rejected the group; its prompt has that end."
    GROUP_DROPPED = "group.dropped", "Policy dropped the group; its prompt has that end."
    GROUP_SKIPPED = "group.skipped", "The verifier failed twice; charged to reward.skip_budget."
    ROLLOUT_COLLECTED = "rollout.collected", "A collection was taken by the trainer."
    ROLLOUT_STOPPED = (
        "rollout.stopped",
        "The stop rule: half of all attempts failed for five minutes.",
    )
    ROLLOUT_EXHAUSTED = "rollout.exhausted", "No prompt is remaining or pending: end of data."
    ADMISSION_PAUSED = "admission.paused", "The gate is shut for training calls."
    ADMISSION_RESUMED = "admission.resumed", "The gate is open; what waited kept its place."
    PRODUCER_FAILED = "producer.failed", "The producer ended for good; the session ends with it."
    REQUEST_FAILED = (
        "request.failed",
        "A generation request failed; its class decides what follows.",
    )
    VERIFIER_FAILED = "verifier.failed", "A verifier crashed, hung or returned no number."
    VERIFIER_RESTARTED = "verifier.restarted", "A verifier worker was killed and started again."
    VERIFIER_UNREAPED = "verifier.unreaped", "A killed worker has not gone yet; it is left behind."
    LEDGER_VIOLATED = "ledger.violated", "A prompt is in no state or in two; the run ends."

    # Engines, publication
    ENGINE_STARTED = "engine.started", "A server answers; it gets no traffic before a publication."
    ENGINE_VERIFIED = "engine.verified", "Its weights were proved to be the published policy's."
    ENGINE_SUSPECTED = "engine.suspected", "A health probe was missed."
    ENGINE_RECOVERED = "engine.recovered", "A suspected engine answered again."
    ENGINE_DIED = "engine.died", "The engine is gone; its groups are requeued."
    ENGINE_DECODER_FAILED = "engine.decoder_failed", "The embedded decoder raised; the engine ends."
    ENGINE_RESTARTED = "engine.restarted", "A slot has a new incarnation."
    ENGINE_STOPPED = "engine.stopped", "The embedded server closed its door and left."
    ENGINE_REQUEST_FAILED = "engine.request_failed", "A request raised inside the embedded server."
    ENGINE_RETIRED = "engine.retired", "A slot used up its restarts, or the run is ending."
    PUBLICATION_STARTED = "publication.started", "Weights of the named policy go to the engines."
    PUBLICATION_COMMITTED = "publication.committed", "At least one engine was verified at it."
    PUBLICATION_STAGE_STARTED = "publication.stage_started", "Diagnostics: a step of a publication."
    PUBLICATION_STAGE_FINISHED = "publication.stage_finished", "Diagnostics: that step ended."
    PUBLICATION_STAGE_FAILED = "publication.stage_failed", "Diagnostics: that step raised."
    PUBLICATION_RECORD_DROPPED = (
        "publication.record_dropped",
        "A decision record could not be written; the publication itself stands.",
    )
    PUBLICATION_FAILED = "publication.failed", "No engine was verified; the old policy stays."
    PUBLICATION_GROUP_LEFT_BEHIND = (
        "publication.group_left_behind",
        "A broken collective group could not be destroyed; a new one takes its place.",
    )
    GENERATION_PAUSED = "generation.paused", "Engines stopped decoding for a swap."
    GENERATION_RESUMED = "generation.resumed", "Engines decode again."

    # Training, contracts
    TRAINER_STARTED = "trainer.started", "All trainer ranks hold the weights."
    TRAINER_LOST = "trainer.lost", "A rank is gone; its siblings were ended at once."
    UPDATE_FINISHED = "update.finished", "One collection was trained on."
    UPDATE_SKIPPED = "update.skipped", "A step was not applied: its gradient was not finite."
    CONTRACT_VIOLATED = "contract.violated", "State that must not be trained on; numbers are here."
    ROUTER_LOADED = "router_load", "Expert load of one update of an MoE model."

    # Commits, evaluation, export
    CHECKPOINT_STAGED = (
        "checkpoint.staged",
        "Trainer state was copied to host memory; stall_s is all.",
    )
    CHECKPOINT_COMMITTED = "checkpoint.committed", "The commit record stands in the chain."
    CHECKPOINT_FAILED = (
        "checkpoint.failed",
        "Files could not be written; the next boundary tries anew.",
    )
    CHECKPOINT_RESTORED = "checkpoint.restored", "Trainer and ledger stand at this commit."
    CHECKPOINT_REFUSED = (
        "checkpoint.refused",
        "A commit's files are damaged; an older one is tried.",
    )
    CHECKPOINT_LEFTOVER = "checkpoint.leftover", "A folder could not be deleted; it is harmless."
    CHECKPOINT_DELETED = "checkpoint.deleted", "Retention removed a checkpoint."
    EVALUATION_REQUESTED = "evaluation.requested", "A request file was written."
    EVALUATION_STARTED = "evaluation.started", "A set is being generated and judged."
    EVALUATION_FINISHED = "evaluation.finished", "A result stands; metrics are here."
    EVALUATION_FAILED = "evaluation.failed", "Counts done, failed, untried, by error class."
    EVALUATION_SKIPPED = (
        "evaluation.skipped",
        "It will not run; reason says whether it comes again.",
    )
    EVALUATION_RESUBMITTED = "evaluation.resubmitted", "A further try was claimed and submitted."
    EXPORT_FINISHED = "export.finished", "A Hugging Face folder stands, verified."
    EXPORT_FAILED = (
        "export.failed",
        "The export could not be written; the session tries it again.",
    )
    CACHE_RESTORED = "cache.restored", "Compiler caches were unpacked for a warm start."
    CACHE_PUBLISHED = (
        "cache.published",
        "Publishing compiler caches is over; outcome says how.",
    )

    # Telemetry about itself
    ROWS_DROPPED = "rows.dropped", "The disk takes no rows of this file; they are counted."
    ROWS_RESUMED = "rows.resumed", "It takes them again; num_dropped are missing."
    ERRORS_SERIES_FAILED = "errors_series.failed", "A row of errors/* could not be recorded."
    ERRORS_ROW_FAILED = "errors_row.failed", "A row of rollout_errors.jsonl was not recorded."
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
    REPORT_WRITTEN = "report.written", "reports/report.html is new."
    LIBRARY_WARNED = "library.warned", "Another library logged a warning or an error."

    # Faults on purpose
    FAULT_INJECTED = "fault.injected", "A fault plan fired at a named point."
