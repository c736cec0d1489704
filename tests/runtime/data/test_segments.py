"""What a commit stores of the ledger: read back equal, refused when damaged or wrong."""

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.history import read_history
from runtime.data.ledger import STALE, Ledger
from runtime.data.order import PromptOrder
from runtime.data.segments import EMPTY_DIGEST, LedgerSegment
from runtime.errors import ContractViolation, PartialWrite

ORDER = {"num_prompts": 6, "epochs": 2, "seed": 1}


def committed(ledger):
    segment = ledger.snapshot()
    ledger.committed(segment)
    return segment


def admit(ledger, count):
    admissions = [ledger.admit() for _ in range(count)]
    return [(a.prompt_id, a.attempt) for a in admissions]


def history():
    """Three commits: nothing; two consumed, one filtered; one of each other end, two pending."""
    ledger = Ledger(PromptOrder(**ORDER))
    segments = [committed(ledger)]
    keys = admit(ledger, 3)
    for key in keys[:2]:
        ledger.finish(*key)
    ledger.consume(keys[:2], 1)
    ledger.filter(*keys[2])
    segments.append(committed(ledger))
    keys = admit(ledger, 5)
    ledger.finish(*keys[0])
    ledger.consume(keys[:1], 2)
    ledger.drop(*keys[1])
    ledger.skip(*keys[2])
    ledger.requeue(*keys[3], STALE)
    segments.append(committed(ledger))
    return segments


def changed(segment, **parts):
    """The same segment with columns or numbers set to something else, unvalidated by its writer."""
    content = json.loads(gzip.decompress(segment.to_bytes()))
    for path, value in parts.items():
        *parents, last = path.split("__")
        node = content
        for name in parents:
            node = node[name]
        node[last] = value
    return LedgerSegment.from_bytes(gzip.compress(json.dumps(content).encode()))


def test_a_segment_holds_only_what_ended_since_its_parent():
    first, second, third = history()
    assert (len(first.consumed), len(second.consumed), len(third.consumed)) == (0, 2, 1)
    assert (first.parent, second.parent) == (None, first.checksum())
    assert (first.digest, first.last_update) == (EMPTY_DIGEST, -1)
    assert third.totals.consumed == 3
    assert third.pending.num_stale == (1, 0)
    assert third.pending.attempt == (1, 1)
    assert third.pending.position == (6, 7)


def test_the_same_segment_has_the_same_bytes():
    for one, other in zip(history(), history(), strict=True):
        assert one.to_bytes() == other.to_bytes()
        again = LedgerSegment.from_bytes(one.to_bytes())
        assert again == one
        assert again.checksum() == one.checksum()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_is_refused(data):
    blob = bytearray(history()[2].to_bytes())
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        # The gzip header holds a time, a system and a flag that say nothing of the content.
        at = data.draw(st.integers(10, len(blob) - 1))
        blob[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PartialWrite, match="cannot be read"):
        LedgerSegment.from_bytes(bytes(blob))


@pytest.mark.parametrize(
    "parts",
    [
        {"schema_version": 2},
        {"novelty": 1},
        {"cursor": -1},
        {"cursor": "6"},
        {"consumed__update": [1, 2]},
        {"pending__position": [6]},
        {"filtered__index": [1, 2, 3]},
        {"digest": "not hex"},
    ],
)
def test_what_this_version_cannot_read_is_refused(parts):
    with pytest.raises(PartialWrite):
        changed(history()[2], **parts)


def test_history_must_be_linked_and_begin_at_commit_0():
    first, second, third = history()
    with pytest.raises(ContractViolation, match="no ledger segment"):
        read_history([])
    with pytest.raises(ContractViolation, match="does not continue"):
        read_history([first, third])
    with pytest.raises(ContractViolation, match="begins in the middle"):
        read_history([second, third])
    with pytest.raises(ContractViolation, match="does not continue"):
        Ledger.restore([first, third], PromptOrder(**ORDER))


def test_a_report_counts_what_is_there_and_not_what_totals_say():
    *before, last = history()
    honest = read_history([*before, last])
    assert (honest.consumed, honest.filtered, honest.dropped, honest.skipped) == (3, 1, 1, 1)
    assert (honest.pending, honest.remaining, honest.requeued) == (2, 4, 1)
    assert (honest.lost, honest.doubled) == (0, 0)
    lost = read_history([*before, changed(last, dropped={"pass_": [], "index": []})])
    assert (lost.lost, lost.doubled) == (1, 0)
    filtered = before[1].filtered
    twice = {"pass_": filtered.pass_, "index": filtered.index}
    doubled = read_history([*before, changed(last, skipped=twice)])
    assert (doubled.lost, doubled.doubled) == (1, 1)
    often = {"pass_": filtered.pass_ * 256, "index": filtered.index * 256}
    assert read_history([*before, changed(last, skipped=often)]) == replace(doubled, skipped=256)
    open_and_ended = {"pass_": last.pending.pass_[:1], "index": last.pending.index[:1]}
    both = read_history([*before, changed(last, dropped=open_and_ended)])
    assert (both.lost, both.doubled) == (1, 1)


def test_a_prompt_from_nowhere_is_refused():
    *before, last = history()
    for pass_, index in ((2, 0), (0, 6), (-1, 0), (0, -1)):
        with pytest.raises(ContractViolation, match="outside the passes begun"):
            read_history([*before, changed(last, dropped={"pass_": [pass_], "index": [index]})])


def test_the_digest_must_follow_from_what_was_consumed():
    *before, last = history()
    for update in ([1], [3]):
        with pytest.raises(ContractViolation, match="stores the digest"):
            read_history([*before, changed(last, consumed__update=update)])


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"num_prompts": 7}, {"shuffle": False}, {"epochs": 1}],
    ids=lambda other: next(iter(other)),
)
def test_a_run_goes_on_only_with_the_order_it_began_with(other):
    with pytest.raises(ContractViolation, match="the ledger was made with the order"):
        Ledger.restore(history(), PromptOrder(**(ORDER | other)))


def test_more_passes_may_be_asked_for_on_resume():
    ledger = Ledger.restore(history(), PromptOrder(**(ORDER | {"epochs": 5})))
    assert len(admit(ledger, 30 - 8 + 2)) == 24
    assert ledger.admit() is None


@pytest.mark.parametrize(
    "parts",
    [
        {"pending__index": [0, 0]},
        {"pending__position": [6, 8]},
        {"totals__consumed": 2},
        {"totals__skipped": 2},
        {"cursor": 9},
        {"cursor": 7},
    ],
)
def test_a_segment_that_does_not_add_up_is_not_restored(parts):
    with pytest.raises(ContractViolation):
        Ledger.restore([changed(history()[2], **parts)], PromptOrder(**ORDER))


def test_a_commit_out_of_turn_is_a_violation():
    ledger = Ledger(PromptOrder(**ORDER))
    first = ledger.snapshot()
    ledger.committed(first)
    with pytest.raises(ContractViolation, match="out of turn"):
        ledger.committed(first)
