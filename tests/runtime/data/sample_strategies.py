"""Hypothesis strategies of samples, groups and collections that are in order."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from runtime.data.samples import Collection, Group, Prompt, PromptId, Sample, Span
from runtime.data.teacher import TeacherScores
from runtime.policy import PolicyId


def examples(count):
    """Settings for a shared, busy machine: no test fails because somebody else computes."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


VOCABULARY = 300
EPOCH = 3

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=10)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-10, 10) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def teacher_scores(draw, num_tokens):
    """None, of the response's own tokens, or of a teacher's likeliest ones."""
    top_k = draw(st.none() | st.integers(0, 3))
    if top_k is None:
        return None
    value = st.floats(-50, 0, width=32)
    rows = [[draw(value) for _ in range(max(top_k, 1))] for _ in range(num_tokens)]
    if top_k == 0:
        return TeacherScores.of_sampled([row[0] for row in rows])
    return TeacherScores.of_likeliest(rows, [[i * 7 for i in range(top_k)] for _ in rows])


@st.composite
def samples(draw, *, rewarded=True):
    n = draw(st.integers(1, 12))
    ends = sorted(draw(st.sets(st.integers(1, n), max_size=3)) | {n})
    updates = sorted(
        draw(st.lists(st.integers(0, 60), min_size=len(ends) + 1, max_size=len(ends) + 1))
    )
    prefill, *policies = [PolicyId(EPOCH, update) for update in updates]
    rewards = st.floats(-10, 10)
    masks = st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n).map(tuple)
    return Sample(
        token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n))),
        logprobs=tuple(draw(st.lists(st.floats(-50, 0), min_size=n, max_size=n))),
        spans=tuple(map(Span, [0, *ends[:-1]], ends, policies)),
        prefill=prefill,
        finish=draw(st.sampled_from(["stop", "length"])),
        text=draw(TEXTS),
        reward=draw(rewards if rewarded else st.none() | rewards),
        loss_mask=draw(st.none() | masks),
        teacher=draw(teacher_scores(n)),
    )


@st.composite
def groups(draw, *, rewarded=True):
    prompt = Prompt(
        id=PromptId(draw(st.integers(0, 3)), draw(st.integers(0, 2**40))),
        token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8))),
        text=draw(TEXTS),
        answer=draw(st.none() | TEXTS),
        verifier=draw(TEXTS),
        metadata=draw(st.dictionaries(TEXTS, JSON_VALUES, max_size=3)),
    )
    some = st.lists(samples(rewarded=rewarded), min_size=1, max_size=3)
    return Group(prompt=prompt, attempt=draw(st.integers(1, 9)), samples=tuple(draw(some)))


@st.composite
def collections(draw, *, rewarded=True, min_groups=0):
    return Collection(
        id=draw(st.integers(1, 10**6)),
        groups=tuple(draw(st.lists(groups(rewarded=rewarded), min_size=min_groups, max_size=3))),
        taken_at=PolicyId(EPOCH, draw(st.integers(0, 60))),
    )
