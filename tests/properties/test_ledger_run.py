"""Whole runs: many kills, and every prompt ends once in committed history."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.history import consumed_prompts, read_history
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import PromptId


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_prompts=st.integers(1, 30), epochs=st.integers(1, 2))
def test_every_prompt_ends_once_whatever_is_killed(seed, num_prompts, epochs):
    chance = random.Random(seed)
    order = PromptOrder(num_prompts, epochs=epochs, seed=seed)
    ledger, update, kills = Ledger(order), 0, 0
    history = [ledger.snapshot()]
    ledger.committed(history[0])
    flying: list[tuple[PromptId, int]] = []
    done: list[tuple[PromptId, int]] = []
    while not ledger.is_exhausted:
        if kills < 10 and chance.random() < 0.03:
            kills += 1
            ledger, flying, done = Ledger.restore(history, order), [], []
            update = history[-1].last_update
        elif chance.random() < 0.5 and (admission := ledger.admit()) is not None:
            flying.append((admission.prompt_id, admission.attempt))
        elif flying:
            key = flying.pop(chance.randrange(len(flying)))
            what = chance.random()
            if what < 0.6:
                assert ledger.finish(*key)
                done.append(key)
            elif what < 0.9:
                assert ledger.requeue(*key, "transport")
            else:
                assert ledger.filter(*key)
        if len(done) >= 3 or (done and not flying):
            update += 1
            ledger.consume(done, update)
            done = []
            if chance.random() < 0.5:
                history.append(ledger.snapshot())
                ledger.committed(history[-1])
    history.append(ledger.snapshot())
    report = read_history(history)
    assert report.consumed + report.filtered == order.total
    assert report.lost == report.doubled == report.pending == report.remaining == 0
    assert report.digest == ledger.digest
    used = [prompt for prompt, _ in consumed_prompts(history)]
    assert len(used) == len(set(used)) == report.consumed


def test_a_resumed_run_asks_in_the_order_of_an_undisturbed_one():
    order = PromptOrder(50, seed=4)
    undisturbed = [order.at(i) for i in range(50)]
    ledger, asked, kept = Ledger(order), [], [Ledger(order).snapshot()]
    while not ledger.is_exhausted:
        batch = [ledger.admit() for _ in range(5)]
        keys = [(a.prompt_id, a.attempt) for a in batch if a is not None]
        for key in reversed(keys):  # finishing out of order changes nothing
            ledger.finish(*key)
        ahead = ledger.admit()  # in flight when the commit is made, again and again
        ledger.consume(keys, len(asked) // 5 + 1)
        asked += [prompt for prompt, _ in keys]
        segment = ledger.snapshot()
        ledger.committed(segment)
        kept.append(segment)
        if ahead is not None:
            ledger = Ledger.restore(kept[-1:], order)
    assert asked == undisturbed
