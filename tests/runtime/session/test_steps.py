import hypothesis.strategies as st
import pytest
from hypothesis import given

from runtime.session.steps import Step, StepKind, boundaries, plan_steps

updates = st.integers(1, 60)


@given(updates, st.integers(1, 70), st.integers(1, 5))
def test_boundaries_are_whole_collections_and_never_early(n: int, every: int, per: int) -> None:
    due = boundaries(every, updates=n, updates_per_collection=per)
    assert all(u % per == 0 for u in due)
    # Between any multiple of the cadence and its boundary lies less than one collection.
    for multiple in range(every, n - per + 2, every):
        assert any(multiple <= u < multiple + per for u in due)


@given(
    updates,
    st.integers(1, 70),
    st.none() | st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("a",), ("a", "b")]),
)
def test_a_plan_tells_the_run_in_order(n, commit, evaluate, final, export, sets) -> None:
    steps = plan_steps(
        updates=n,
        checkpoint_every=commit,
        evaluation_every=evaluate,
        evaluation_sets=sets,
        evaluates_final=final,
        exports_final=export,
    )
    assert [str(s) for s in steps[:2]] == ["prepare", "rendezvous"]
    assert str(steps[-1]) == "finish"
    assert len(set(map(str, steps))) == len(steps)
    reached = 0
    committed = 0
    for step in steps:
        # Whoever asks in order has seen committed what the step builds on.
        assert step.after <= committed
        if step.kind is StepKind.SEGMENT:
            assert step.update > reached
            reached = step.update
        if step.kind is StepKind.CHECKPOINT:
            assert step.update == reached
            committed = reached
        if step.kind is StepKind.EVALUATION:
            # Evaluating an update commits it first, so that no rewind goes below it.
            assert step.update == committed
    assert reached == committed == n
    final_sets = [s.set_name for s in steps if s.kind is StepKind.EVALUATION and s.update == n]
    if final:
        assert final_sets == list(sets)


@given(st.sampled_from(list(StepKind)), st.integers(0, 10**6), st.sampled_from("ab"))
def test_a_step_reads_back(kind: StepKind, update: int, name: str) -> None:
    at = kind in (StepKind.SEGMENT, StepKind.CHECKPOINT, StepKind.EVALUATION, StepKind.EXPORT)
    step = Step(
        kind=kind,
        update=update if at else None,
        set_name=name if kind is StepKind.EVALUATION else None,
    )
    assert Step.parse(str(step)) == step


@pytest.mark.parametrize("text", ["", "segment", "segment/x", "prepare/3", "evaluation/3", "fly"])
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"step|StepKind|update"):
        Step.parse(text)
