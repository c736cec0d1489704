"""`milepost validate FILE`: the plan, and what can be checked of the inputs from here."""

from __future__ import annotations

import json
from typing import Any

import typer

from configs.inputs import InputReport, check_inputs
from configs.load import LoadedRun
from configs.plan import Plan, make_plan
from configs.problems import Problem
from flows.commands._run_file import AsJson, Debug, RunFile, Sets, load_or_exit, show_problems


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(validate)


def validate(
    file: RunFile, sets: Sets = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Check a run file and its inputs; list every problem. 0: none, 1: some."""
    loaded = load_or_exit(file, sets, as_json=as_json, debug=debug)
    plan = make_plan(loaded)
    report = check_inputs(loaded.spec)
    _check_keepalive(loaded, report)
    problems = [_problem(loaded, *each) for each in report.problems]
    if as_json:
        typer.echo(json.dumps(_answer(plan, report, problems)))
    else:
        _show(plan, report)
        if problems:
            show_problems(problems, as_json=False)
        else:
            typer.echo(f"{loaded.spec.name}: no problems found")
    raise typer.Exit(1 if problems else 0)


def _check_keepalive(loaded: LoadedRun, report: InputReport) -> None:
    """Engines must keep idle connections longer than our clients reuse them."""
    from runtime.engines.keepalive import (
        CLIENT_KEEPALIVE_S,
        SERVER_KEEPALIVE_S,
        check_keepalive_order,
    )
    from runtime.errors import ConfigError

    field = "rollout.engine_args.keepalive_s"
    server_s = loaded.spec.rollout.engine_args.get("keepalive_s", SERVER_KEEPALIVE_S)
    if isinstance(server_s, str | bool):
        report.problems.append((field, f"must be seconds as a number, not {server_s!r}"))
        return
    try:
        check_keepalive_order(server_s=server_s)
    except ConfigError as error:
        report.problems.append((field, error.message))
    else:
        report.checked.append(
            f"keep-alive: engines keep idle connections {server_s:g} s, "
            f"clients reuse them for {CLIENT_KEEPALIVE_S:g} s"
        )


def _problem(loaded: LoadedRun, field: str, message: str) -> Problem:
    from configs.positions import key_lines

    line = key_lines(loaded.text).get(tuple(field.split(".")))
    return Problem(file=str(loaded.path), line=line, field=field, value=None, message=message)


def _answer(plan: Plan, report: InputReport, problems: list[Problem]) -> dict[str, Any]:
    return {
        "ok": not problems,
        "name": plan.name,
        "training_digest": plan.training_digest,
        "problems": [problem.as_json() for problem in problems],
        "warnings": plan.warnings,
        "checked": report.checked,
        "skipped": report.skipped,
        "not_available": plan.not_available,
        "not_checked": plan.not_checked,
    }


def _show(plan: Plan, report: InputReport) -> None:
    for title, lines in (
        ("checked", report.checked),
        ("skipped", report.skipped),
        ("warnings", plan.warnings),
        ("not available yet", [line.partition(": ")[2] for line in plan.not_available]),
        ("not checked", plan.not_checked),
    ):
        if lines:
            typer.echo(f"{title}")
            for line in lines:
                typer.echo(f"  - {line}")
