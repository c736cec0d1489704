import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.errors import DiskFull
from runtime.evaluation.items import Item, ItemLog, ItemSample

SAMPLE = ItemSample(text="dcba", reward=1.0, num_tokens=5, capped=False)


def done(index: int, *, reward: float = 1.0, digest: str = "d", policy: str = "e1.u5") -> Item:
    return Item(
        set_digest=digest,
        policy=policy,
        attempt=1,
        epoch=1,
        index=index,
        state="done",
        samples=(SAMPLE.model_copy(update={"reward": reward}),),
        time=1.0,
    )


def missing(index: int) -> Item:
    given_ = done(index).model_dump() | {"state": "missing", "samples": (), "error": "crashed"}
    return Item.model_validate(given_)


def open_log(folder: Path) -> ItemLog:
    return ItemLog(folder / "e1.u5" / "held" / "items.jsonl", set_digest="d", policy="e1.u5")


def test_a_resumed_evaluation_repeats_no_item(tmp_path: Path) -> None:
    for index in (0, 2):
        open_log(tmp_path).append(done(index))
    open_log(tmp_path).append(missing(3))
    assert open_log(tmp_path).remaining(range(5)) == [1, 4]


def test_done_wins_over_missing_and_the_first_over_a_repetition(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for item in (missing(0), done(0, reward=0.5), done(0, reward=0.25), missing(0)):
        log.append(item)
    (item,) = log.read().values()
    assert item.samples[0].reward == 0.5
    assert item.judged().rewards == (0.5,)


@given(st.integers(0, 400), st.integers(1, 4))
def test_a_kill_in_the_middle_of_a_line_costs_that_item_only(cut: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = open_log(Path(folder))
        for index in range(count):
            log.append(done(index))
        data = log.path.read_bytes()
        log.path.write_bytes(data[: max(0, len(data) - cut)])
        survived = set(log.read())
        log.append(done(9))
        assert set(open_log(Path(folder)).read()) == survived | {9}


def test_items_of_another_question_or_policy_do_not_count(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(ValueError, match="does not belong"):
        log.append(done(1, digest="other"))
    log.append(done(1))
    foreign = ItemLog(log.path, set_digest="other", policy="e1.u5")
    assert foreign.read() == {}


def test_an_item_that_cannot_be_written_fails_the_evaluation(tmp_path: Path) -> None:
    log = ItemLog(tmp_path / "items.jsonl", set_digest="d", policy="e1.u5")
    log.path.symlink_to("/dev/full")
    with pytest.raises(DiskFull):
        log.append(done(0))


def test_a_missing_item_holds_no_samples_and_a_done_one_does() -> None:
    with pytest.raises(ValidationError, match="missing with 1 samples"):
        Item.model_validate(done(0).model_dump() | {"state": "missing"})
    with pytest.raises(ValidationError, match="done with 0 samples"):
        Item.model_validate(done(0).model_dump() | {"samples": ()})
