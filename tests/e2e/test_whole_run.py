"""A run with two engines and two trainer ranks, one engine of which dies."""

from collections.abc import Callable

import pytest

from runtime.rundir import history
from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_two_engines_and_two_ranks_go_on_when_an_engine_dies(make_run: Callable[..., Run]) -> None:
    run = make_run("rollout.engines=2", "core.data=2", "core.max_updates=10000", "data.epochs=200")
    run.start_prepared("evaluation.every_updates=1000")
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
