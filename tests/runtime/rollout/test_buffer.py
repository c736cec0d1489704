from hypothesis import given
from hypothesis import strategies as st

from runtime.data.samples import Group, Prompt, PromptId, Sample, Span
from runtime.policy import PolicyId
from runtime.rollout.buffer import Buffer, FinishedGroup

WINDOW = 3


def finished(order, update, num_stale=0):
    policy = PolicyId(1, update)
    sample = Sample(
        token_ids=(1,), logprobs=(-1.0,), spans=(Span(0, 1, policy),), prefill=policy,
        finish="stop", reward=0.0,
    )  # fmt: skip
    prompt = Prompt(id=PromptId(0, order), token_ids=(1,), text="", answer=None, verifier="none")
    group = Group(prompt=prompt, attempt=1, samples=(sample,))
    return FinishedGroup(group=group, order=order, num_stale=num_stale)


def takes_left(oldest):
    """The next take is at update 10, staleness at most ``WINDOW``, one update per collection."""
    return WINDOW - (10 - oldest)


def orders(picked):
    return None if picked is None else [f.order for f in picked]


def filled(*groups, bound=4):
    buffer = Buffer(bound)
    for group in groups:
        buffer.add(group)
    return buffer


def test_the_oldest_policy_comes_first_then_the_first_admitted():
    buffer = filled(finished(3, 9), finished(2, 8), finished(1, 9), finished(0, 10))
    assert orders(buffer.pick(3, takes_left, [])) == [2, 1, 3]


def test_too_few_groups_make_the_trainer_wait():
    assert filled(finished(0, 10)).pick(2, takes_left, []) is None


def test_the_trainer_waits_for_a_group_that_may_not_be_passed_over_again():
    buffer = filled(finished(0, 10), finished(1, 10))
    assert buffer.pick(2, takes_left, [7]) is None
    assert orders(buffer.pick(2, takes_left, [8])) == [0, 1], "that one can wait for a take more"


def test_an_awaited_group_goes_before_an_older_one_when_both_cannot_go():
    buffer = filled(finished(0, 7), finished(1, 8, 1), finished(2, 8, 1))
    assert orders(buffer.pick(1, takes_left, [])) == [1], "two are due within one further take"


def test_groups_beyond_the_bound_wait_for_room_and_can_still_be_taken():
    buffer = filled(*(finished(i, 10) for i in range(4)), finished(4, 7, 1), bound=4)
    assert buffer.num_waiting_for_room == 1
    assert 4 in orders(buffer.pick(2, takes_left, []))


groups = st.lists(
    st.tuples(st.integers(10 - WINDOW, 10), st.booleans(), st.booleans()), max_size=12
)


@given(groups, st.integers(1, 3))
def test_a_choice_never_makes_a_later_one_impossible(drawn, count):
    ready, awaited = [], []
    for order, (update, is_owed, is_ready) in enumerate(drawn):
        if is_ready:
            ready.append(finished(order, update, int(is_owed)))
        elif is_owed:
            awaited.append(update)
    owed = [f.group.oldest.update for f in ready if f.num_stale] + awaited
    due = [sum(takes_left(u) <= j for u in owed) for j in range(WINDOW + 1)]
    if any(n > count * (j + 1) for j, n in enumerate(due)):
        return  # the bound on admissions rules this out
    picked = filled(*ready).pick(count, takes_left, awaited)
    if picked is None:
        # Waiting is right only if something under way is needed, or too little is there.
        assert len(ready) < count or any(
            due[takes_left(u)] > count * takes_left(u) for u in awaited
        )
        return
    assert len(set(orders(picked))) == count
    left = [f.group.oldest.update for f in ready if f.num_stale and f not in picked] + awaited
    for j in range(WINDOW + 1):
        assert sum(takes_left(u) <= j for u in left) <= count * j
