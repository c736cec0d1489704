"""When a task is tried again: its error names who may, and the task is one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from runtime.errors import RetryBy, RunError

Condition = Callable[["Task[..., object]", TaskRun, "State[object]"], Awaitable[bool]]


def retried_by(who: RetryBy) -> Condition:
    """Retry condition of a task that tries again what ``who`` may try again."""

    async def condition(task: Task[..., object], run: TaskRun, state: State[object]) -> bool:
        del task, run
        try:
            await state.result(raise_on_failure=True)  # type: ignore[misc]
        except RunError as error:
            return error.retry is who
        except BaseException:
            return False
        return False

    return condition
