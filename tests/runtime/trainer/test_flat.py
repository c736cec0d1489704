import dataclasses

import numpy as np
import pytest

from runtime.errors import ContractViolation
from runtime.trainer import contracts
from runtime.trainer.flat import flatten
from runtime.trainer.protocol import Sequence
from tests.runtime.trainer.tiny import make_sequences


def with_spans(s: Sequence, ends: list[int], updates: list[int], prefill: int) -> Sequence:
    n = ends[-1]
    return dataclasses.replace(
        s,
        tokens=np.arange(4, 4 + s.prompt_len + n, dtype=np.int32),
        logprobs=np.full(n, -1.0, np.float32),
        mask=np.ones(n, np.float32),
        span_ends=np.array(ends, np.int32),
        span_updates=np.array(updates, np.int32),
        prefill_update=prefill,
    )


def test_only_responses_wholly_of_the_policy_qualify() -> None:
    base = make_sequences(0, groups=1, samples=1)[0]
    flat = flatten(
        (
            with_spans(base, [3], [5], prefill=5),
            with_spans(base, [3], [5], prefill=4),  # another policy read the prompt
            with_spans(base, [1, 3], [4, 5], prefill=4),
            with_spans(base, [3], [4], prefill=4),
        )
    )
    assert flat.wholly_of(5).tolist() == [True, False, False, False]
    assert flat.is_mixed_S.tolist() == [False, False, True, False]
    assert flat.latest_R[6:9].tolist() == [False, True, True]


def test_agreement_is_the_mean_over_tokens_of_the_qualifying_responses() -> None:
    base = make_sequences(0, groups=1, samples=1)[0]
    flat = flatten((with_spans(base, [3], [5], 5), with_spans(base, [2], [4], 4)))
    train = np.array([-1.1, -1.0, -0.6, 7.0, 7.0], np.float32)
    figures = contracts.policy_agreement(flat, train, np.ones(5, dtype=np.bool_), current_update=5)
    assert figures["agreement/gap_mean"] == pytest.approx(0.5 / 3, rel=1e-5)
    assert figures["agreement/gap_max"] == pytest.approx(0.4, rel=1e-5)
    assert (figures["agreement/tokens"], figures["agreement/responses"]) == (3, 1)
    contracts.require_agreement(figures, limit=0.2, update=6)
    with pytest.raises(ContractViolation, match=r"1\.667e-01 .* is above 1\.0e-01"):
        contracts.require_agreement(figures, limit=0.1, update=6)


def test_nothing_measured_is_no_violation() -> None:
    assert (
        contracts.policy_agreement(
            flatten(make_sequences(0)),
            np.zeros(flatten(make_sequences(0)).num_tokens, np.float32),
            np.ones(flatten(make_sequences(0)).num_tokens, dtype=np.bool_),
            current_update=3,
        )
        == {}
    )
    contracts.require_agreement({}, limit=0.0, update=1)


def test_a_gap_that_is_no_number_is_a_violation() -> None:
    nan = float("nan")
    figures = {f"agreement/{n}": nan for n in ("gap_mean", "gap_p99", "gap_max", "tokens")}
    with pytest.raises(ContractViolation):
        contracts.require_agreement(figures, limit=1.0, update=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "does not fit together"),
        ({"mask": np.zeros(99, np.float32)}, "does not fit together"),
        ({"span_ends": np.array([2], np.int32)}, "does not fit together"),
        ({"prompt_len": 0}, "does not fit together"),
        ({"span_updates": np.array([1, 2, 3], np.int32)}, "1 span ends, 3 policies"),
    ],
)
def test_arrays_that_disagree_are_refused(change: dict[str, object], message: str) -> None:
    good = with_spans(make_sequences(0)[0], [5], [0], 0)
    flatten((good,))
    with pytest.raises(ContractViolation, match=message):
        flatten((good, dataclasses.replace(good, **change)))  # type: ignore[arg-type]


def test_an_empty_collection_is_refused() -> None:
    with pytest.raises(ContractViolation, match="without sequences"):
        flatten(())


def test_groups_are_counted_by_kind() -> None:
    assert flatten(make_sequences(1, groups=5, equal=(0, 3))).num_groups() == (3, 2)


def test_active_tokens_are_counted_per_sequence_even_without_any() -> None:
    base = with_spans(make_sequences(0)[0], [3], [0], 0)
    silent = dataclasses.replace(base, mask=np.zeros(3, np.float32))
    assert flatten((silent, base, silent)).active_per_sequence().tolist() == [0, 3, 0]
