"""How full gate, calls, buffer and engines are: the columns of ``pipeline_occupancy.jsonl``."""

from __future__ import annotations

from runtime.engines.pool import EnginePool
from runtime.rollout.buffer import Buffer
from runtime.rollout.calls import GenerationCalls
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.slots import SampleSlots

Columns = dict[str, float | str | None]


def of_gate(gate: AdmissionGate) -> Columns:
    """Is training's admission shut, who waits outside, who is inside."""
    return {
        "generation_admission_paused": float(not gate.is_open),
        "generation_admission_waiters": gate.waiters,
        "generation_active_calls": gate.active,
    }


def of_calls(calls: GenerationCalls, slots: SampleSlots) -> Columns:
    """HTTP requests under way, the samples in them, and their bound."""
    return {
        "http_active_calls": calls.active,
        "samples_in_flight": slots.used,
        "sample_slots": slots.used + slots.free,
        "responses_continued": calls.continued,
    }


def of_buffer(buffer: Buffer) -> Columns:
    """Finished groups in the buffer, beyond its bound, and the bound."""
    return {
        "groups_buffered": len(buffer) - buffer.num_waiting_for_room,
        "groups_waiting_for_room": buffer.num_waiting_for_room,
        "max_buffered_groups": buffer.bound,
    }


def of_pool(pool: EnginePool) -> Columns:
    """State and samples of every engine."""
    columns: Columns = {}
    for view in pool.views():
        columns[f"engine/{view.slot}/state"] = str(view.state)
        columns[f"engine/{view.slot}/active_samples"] = view.active_samples
    return columns
