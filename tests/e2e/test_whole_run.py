"""A run that nobody disturbs, and what may be asked of it while it runs and afterwards."""

from collections.abc import Callable

import pytest

from runtime.data.collections import read_collection
from runtime.errors import ConfigError
from runtime.rundir import history
from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_undisturbed_run_completes_and_a_second_start_attaches(run: Run) -> None:
    assert run.start().how == "started"
    assert run.start().how == "attached"
    with pytest.raises(ConfigError, match=r"core\.lr: 0\.001 -> 0\.5"):
        run.start("core.lr=0.5")
    run.finish()
    assert (run.epoch, run.end.ended_by) == (1, "max_updates")
    assert_whole(run, updates=8)
    assert [c.update for c in run.commits] == [0, 2, 4, 6, 8]
    assert sorted(p.name for p in run.root.rollouts.glob("*.parquet")) == [
        f"{number:06d}-e1.parquet" for number in range(1, 9)
    ]
    assert_evaluation_resampled_nothing(run)
    assert_export_loads(run)
    before = run.records
    assert run.start().how == "complete"
    assert run.records == before


def assert_evaluation_resampled_nothing(run: Run) -> None:
    """Shared evaluation under refresh: what waited at the gate goes on as it was."""
    paused = run.events("generation.paused")
    assert [event["reason"] for event in paused] == ["evaluation"] * 2
    assert len(run.events("generation.resumed")) == 2
    assert run.ledger().requeued == 0
    for path in run.root.rollouts.glob("*.parquet"):
        assert {group.attempt for group in read_collection(path).groups} == {1}


def assert_export_loads(run: Run) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.root.export)
    trained = AutoModelForCausalLM.from_pretrained(run.root.export, dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(run.initial_model, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("reverse: abcd")])
    with torch.inference_mode():
        gap = (trained(ids).logits - initial(ids).logits).abs().max()
    assert gap > 1e-3  # eight updates were made


def test_two_engines_and_two_ranks_go_on_when_an_engine_dies(make_run: Callable[..., Run]) -> None:
    run = make_run("rollout.engines=2", "core.data=2", "core.max_updates=10000", "data.epochs=200")
    run.start("evaluation.every_updates=1000")
    run.until_committed(2)
    first, _ = run.until_there("engine server", 2)
    first.kill()
    gone = run.events("engine.verified")
    run.until(lambda: run.events("engine.restarted"), "the engine to come back")
    run.until(lambda: len(run.events("engine.verified")) > len(gone), "it to be verified")
    run.until_committed(history.committed_update(run.records) + 4)
    run.stop("final")
    run.finish()
    assert run.epoch == 1
    assert {e["slot"] for e in run.events("engine.died")} in ({0}, {1})
    assert_whole(run, updates=run.end.update)
    commit = run.commits[-1]
    assert commit.layout == {"trainer_ranks": 2, "engines": 2}
    assert {"trainer-00000-of-00002.json", "trainer-00001-of-00002.json"} <= {
        entry.name for entry in commit.files
    }
    last = [e for e in run.events("engine.verified") if e["policy"] == commit.policy]
    assert {e["slot"] for e in last} == {0, 1}
