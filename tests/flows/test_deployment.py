"""prefect.yaml and automations.yaml say what flows and spec promise; no server needed."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.flows import load_flow_from_entrypoint

from flows.commands._server import ServerError, environment, is_healthy
from runtime.rundir.records import Activity
from tests.http_thread import answer_in_thread

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
(ZOMBIE,) = yaml.safe_load(Path("automations.yaml").read_text())["automations"]
PLANNED_RESTART_S = 300.0
HEARTBEAT_S = 30.0


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_is_a_module_path_that_takes_its_parameters(deployment) -> None:
    assert ":" not in deployment["entrypoint"]
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    if deployment["name"] == "background":  # whoever submits a try says which
        given = {"root": "/r", "policy": "e1.u2", "set_name": "held", "number": 0}
        flow.validate_parameters(given)
    else:
        flow.validate_parameters(deployment["parameters"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_flows_of_a_deployment_send_the_heartbeats_that_are_waited_for(deployment) -> None:
    env = deployment["work_pool"]["job_variables"]["env"]
    assert float(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == HEARTBEAT_S


def test_no_restart_of_the_server_is_taken_for_a_crash() -> None:
    trigger = AutomationCore.model_validate(ZOMBIE).trigger
    assert isinstance(trigger, EventTrigger)
    assert trigger.posture is Posture.Proactive
    assert trigger.within.total_seconds() > PLANNED_RESTART_S + 3 * HEARTBEAT_S
    assert trigger.for_each == {"prefect.resource.id"}


def test_a_flow_run_that_ended_under_any_name_is_no_zombie() -> None:
    resumable = {activity.capitalize() for activity in get_args(Activity)} & {"Stopped", "Parked"}
    ends = {"Completed", "Complete", "Failed", "TimedOut", "Crashed", "Cancelled"} | resumable
    assert {f"prefect.flow-run.{name}" for name in ends} <= set(ZOMBIE["trigger"]["expect"])
    assert "prefect.flow-run.heartbeat" in ZOMBIE["trigger"]["expect"]


def test_server_worker_and_ui_are_told_one_port() -> None:
    told = environment(4317)
    assert told["PREFECT_API_URL"] == told["PREFECT_UI_API_URL"] == "http://127.0.0.1:4317/api"
    assert told["PREFECT_SERVER_API_PORT"] == "4317"
    assert told["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
    assert told["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


class Stranger(BaseHTTPRequestHandler):
    """Something else that listens on the port."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"hi")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    thread = answer_in_thread(http)
    yield http.server_port
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.mark.parametrize("status", [200, 404])
def test_a_port_that_is_somebody_elses_is_refused(
    stranger: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stranger, "status", status)
    with pytest.raises(ServerError, match="taken"):
        is_healthy(stranger)


def test_a_free_port_is_not_healthy() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    http.server_close()
    assert not is_healthy(http.server_port)
