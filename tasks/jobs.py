"""Evaluations as deployment runs of their own: how a receipt's claim becomes one, and its state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.exceptions import ObjectNotFound

from runtime.evaluation.job import JobOrder
from runtime.evaluation.submission import JobsAway, JobState
from tasks.display import SERVER_TROUBLE

DEPLOYMENT = "evaluate/background"


class DeploymentJobs:
    """Implements ``runtime.evaluation.submission.Jobs`` over the Prefect server in reach."""

    def __init__(self) -> None:
        self._deployment: UUID | None = None

    def check(self) -> None:
        """See Jobs."""
        with _client() as client:
            self._find(client)

    def state(self, key: str) -> JobState:
        """See Jobs. A run that was deleted is absent, and is submitted again under its key."""
        only = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
        with _client() as client:
            found = client.read_flow_runs(flow_run_filter=only, limit=1)
        if not found:
            return "absent"
        state = found[0].state
        return "over" if state is not None and state.is_final() else "alive"

    def submit(self, key: str, order: JobOrder) -> str:
        """See Jobs."""
        with _client() as client:
            run = client.create_flow_run_from_deployment(
                self._find(client),
                parameters={
                    "root": str(order.root.path),
                    "policy": order.policy,
                    "set_name": order.set_name,
                    "number": order.number,
                },
                name=f"{order.root.path.name} {order.policy} {order.set_name} #{order.number}",
                tags=["milepost", order.root.path.name],
                idempotency_key=key,
            )
        return str(run.id)

    def _find(self, client: SyncPrefectClient) -> UUID:
        if self._deployment is None:
            self._deployment = client.read_deployment_by_name(DEPLOYMENT).id
        return self._deployment


@contextmanager
def _client() -> Generator[SyncPrefectClient]:
    try:
        with get_client(sync_client=True) as client:
            yield client
    except ObjectNotFound as error:
        raise JobsAway(f"this Prefect server has no deployment {DEPLOYMENT}") from error
    except SERVER_TROUBLE as error:
        raise JobsAway(f"the Prefect server takes nothing: {error}") from error
