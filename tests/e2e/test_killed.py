"""kill -9 of every kind of process, at moments nobody chose, and the run still comes out whole."""

import random
import time
from collections.abc import Callable

import pytest

from runtime.rundir import history
from runtime.session.answers import Held, Lost
from runtime.session.ensure import ensure
from tests.e2e.checks import assert_whole
from tests.e2e.running import IDLE_S, Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ENDS_THE_EPOCH = ("guard", "session", "trainer rank", "raylet")
SEED = 11


def test_run_survives_the_death_of_each_of_its_processes(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        "core.max_updates=10000",
        "data.epochs=200",
        "evaluation.every_updates=500",
        # On a loaded machine a slow start counts too; the last epoch has a budget to be spent.
        "health.restarts_per_hour=20",
    )
    dice = random.Random(SEED)
    victims = list(ENDS_THE_EPOCH)
    dice.shuffle(victims)
    # An engine spares the epoch: anywhere before the last epoch, whose engine has its own story.
    victims.insert(dice.randrange(len(victims)), "engine actor")
    assert run.start_prepared().how == "started"
    run.until_committed(2)
    assert_without_torch(run)
    for victim in victims:
        epoch = run.epoch
        run.until_committed(history.committed_update(run.records) + 2)
        time.sleep(dice.uniform(0.0, 0.4))
        run.kill(victim)
        if victim in ENDS_THE_EPOCH:
            is_last = victim == victims[-1]
            take_up_again(run, *(["health.restarts_per_hour=1"] if is_last else []))
            run.until_epoch(epoch + 1)
    run.until_committed(history.committed_update(run.records) + 2)
    assert_held_once_the_only_engine_has_died_too_often(run)
    run.stop("final")
    run.finish()
    assert run.epoch == 1 + len(ENDS_THE_EPOCH), [r for r in run.records if r.kind != "commit"]
    assert run.end.ended_by == "stop_final"
    assert_whole(run, updates=run.end.update)


def assert_without_torch(run: Run) -> None:
    """Whatever trainer and engines have told the session by now, it loads seconds and more."""
    (session,) = run.role("session")
    assert [m.path for m in session.memory_maps() if "libtorch" in m.path] == []


def assert_held_once_the_only_engine_has_died_too_often(run: Run) -> None:
    """The first death is made good by itself, the next one once a person asks."""
    epoch, before = run.epoch, len(run.events("engine.restarted"))
    run.kill("engine server")
    run.until(lambda: len(run.events("engine.restarted")) > before, "the engine to be back")
    run.kill("engine server")
    held = run.until_held()
    # By the wait for a collection, or by the publication it died in.
    assert held.failure.error_class in {"EngineDead", "PublicationFailed"}
    assert run.view.activity == "held"
    reached = run.view.update
    run.retry(held)
    run.until_committed(reached + 2)
    assert run.epoch == epoch


def take_up_again(run: Run, *more: str) -> None:
    """As the flow does: look until it is lost, then start the next epoch."""
    while not isinstance(
        answer := ensure(run.root, "finish", timeout_s=5.0, poll_s=0.1, deadline_s=IDLE_S), Lost
    ):
        assert not isinstance(answer, Held), f"{answer}\n{run.log()}"
    run.start(*more, lost_attempt=answer.attempt)
