"""The only engine dies more often than it may be started again."""

from collections.abc import Callable

import pytest

from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_it_is_held_and_goes_on_once_a_person_asks(make_run: Callable[..., Run]) -> None:
    run = make_run(
        "health.restarts_per_hour=1",
        "core.max_updates=10000",
        "data.epochs=200",
        "evaluation.every_updates=500",
    )
    run.start()
    run.until_committed(2)
    run.kill("engine server")
    run.until(lambda: run.events("engine.restarted"), "the engine to be back")
    run.kill("engine server")
    held = run.until_held()
    # By the wait for a collection, or by the publication it died in.
    assert held.failure.error_class in {"EngineDead", "PublicationFailed"}
    assert run.view.activity == "held"
    reached = run.view.update
    run.retry(held)
    run.until_committed(reached + 2)
    run.stop("final")
    run.finish()
    assert (run.epoch, run.end.ended_by) == (1, "stop_final")
    assert_whole(run, updates=run.end.update)
