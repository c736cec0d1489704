"""Collections come back from their files as they were, and reach the trainer whole."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.collections import read_collection, to_sequences, write_collection
from runtime.data.samples import Span
from runtime.data.teacher import TeacherScores
from runtime.errors import ContractViolation, PartialWrite
from tests.runtime.data.sample_strategies import collections, examples


@examples(40)
@given(collection=collections(rewarded=False))
def test_a_collection_is_read_back_equal(tmp_path_factory, collection):
    path = tmp_path_factory.mktemp("rollouts") / "000012-e3.parquet"
    write_collection(path, collection)
    assert read_collection(path) == collection
    assert pq.read_metadata(path).num_rows == sum(len(g.samples) for g in collection.groups)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@examples(25)
@given(collection=collections(), data=st.data())
def test_a_file_cut_off_anywhere_is_refused(tmp_path_factory, collection, data):
    path = tmp_path_factory.mktemp("rollouts") / "torn.parquet"
    write_collection(path, collection)
    blob = path.read_bytes()
    path.write_bytes(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(PartialWrite, match=r"torn\.parquet"):
        read_collection(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PartialWrite, match=r"gone\.parquet"):
        read_collection(tmp_path / "gone.parquet")


@examples(15)
@given(collections(min_groups=1))
def test_spans_that_do_not_tile_are_not_written(collection):
    group = collection.groups[0]
    sample = group.samples[0]
    broken = replace(sample, spans=(Span(1, len(sample.token_ids) + 1, sample.prefill),))
    groups = (replace(group, samples=(broken,)), *collection.groups[1:])
    with pytest.raises(ContractViolation, match="gaps or overlaps"):
        write_collection(Path("never"), replace(collection, groups=groups))


@examples(15)
@given(collections(min_groups=1))
def test_a_group_without_samples_is_not_written(collection):
    groups = (*collection.groups, replace(collection.groups[0], samples=()))
    with pytest.raises(ContractViolation, match="without samples"):
        write_collection(Path("never"), replace(collection, groups=groups))


@examples(30)
@given(collection=collections(), data=st.data())
def test_the_trainer_gets_every_token_beside_its_siblings(collection, data):
    advantages = [
        data.draw(st.lists(st.floats(-3, 3), min_size=len(g.samples), max_size=len(g.samples)))
        for g in collection.groups
    ]
    sequences = to_sequences(collection, advantages)
    expected = [
        (g, group, sample, advantage)
        for g, (group, of_group) in enumerate(zip(collection.groups, advantages, strict=True))
        for sample, advantage in zip(group.samples, of_group, strict=True)
    ]
    assert len(sequences) == len(expected)
    for sequence, (g, group, sample, advantage) in zip(sequences, expected, strict=True):
        n, prompt = len(sample.token_ids), group.prompt.token_ids
        assert tuple(sequence.tokens) == prompt + sample.token_ids
        assert sequence.prompt_len == len(prompt)
        assert (sequence.tokens.dtype, sequence.logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(sequence.logprobs, np.float32(sample.logprobs))
        np.testing.assert_array_equal(sequence.mask, np.float32(sample.loss_mask or (1,) * n))
        assert sequence.mask.shape == (n,)
        assert sequence.advantage == advantage
        assert sequence.group == g
        assert sequence.is_equal == group.is_equal
        assert sequence.span_ends.tolist() == [span.end for span in sample.spans]
        assert sequence.span_updates.tolist() == [span.policy.update for span in sample.spans]
        assert sequence.prefill_update == sample.prefill.update
        teacher = sample.teacher
        assert sequence.teacher_logprobs.tobytes() == (teacher.logprobs if teacher else b"")
        assert sequence.teacher_ids.tobytes() == (teacher.ids if teacher else b"")


@examples(15)
@given(collections(min_groups=1))
def test_a_teachers_scores_of_another_response_do_not_reach_the_trainer(collection):
    group, *rest = collection.groups
    sample, *siblings = group.samples
    too_many = TeacherScores.of_sampled([-1.0] * (len(sample.token_ids) + 1))
    group = replace(group, samples=(replace(sample, teacher=too_many), *siblings))
    advantages = [[0.0] * len(g.samples) for g in collection.groups]
    with pytest.raises(ContractViolation, match="do not belong"):
        to_sequences(replace(collection, groups=(group, *rest)), advantages)


@examples(15)
@given(collections(min_groups=1))
def test_advantages_must_fit_the_groups(collection):
    fitting = [[0.0] * len(g.samples) for g in collection.groups]
    for wrong in (fitting[1:], [*fitting, [0.0]], [[*fitting[0], 0.0], *fitting[1:]]):
        with pytest.raises(ContractViolation, match="advantages"):
            to_sequences(collection, wrong)


@examples(15)
@given(collections(min_groups=1))
def test_without_any_reward_every_group_counts_as_equal(collection):
    groups = tuple(
        replace(g, samples=tuple(replace(s, reward=None) for s in g.samples))
        for g in collection.groups
    )
    zeros = [[0.0] * len(g.samples) for g in groups]
    assert all(s.is_equal for s in to_sequences(replace(collection, groups=groups), zeros))
