"""`milepost plan FILE`: what a run file comes to, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from configs.load import LoadedRun
from configs.memory import gib
from configs.plan import Plan, make_plan
from flows.commands._run_file import AsJson, Debug, RunFile, Sets, load_or_exit

Simulate = Annotated[bool, typer.Option("--simulate", help="Add a simulation of the queue.")]

Render = Annotated[bool, typer.Option("--render", help="Print the submission document.")]
Image = Annotated[
    str | None, typer.Option("--image", help="Image of the document: a digest or a Beaker id.")
]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(plan)


def plan(
    file: RunFile,
    sets: Sets = None,
    as_json: AsJson = False,
    simulate: Simulate = False,
    render: Render = False,
    image: Image = None,
    debug: Debug = False,
) -> None:
    """Settle a run file: topology, batches, automatic values with reasons, paths, warnings.

    With --render: the exact document that would be submitted, or 1 with every reason why it may not
    be.
    """
    loaded = load_or_exit(file, sets, as_json=as_json, debug=debug)
    if render:
        render_or_exit(loaded, image, as_json=as_json)
        return
    settled = make_plan(loaded)
    rows = None
    if simulate:
        from configs.simulate import simulate_queue

        rows = simulate_queue(loaded.spec)
    if as_json:
        answer = settled.model_dump(mode="json")
        if rows is not None:
            answer["simulation"] = rows.model_dump(mode="json")
        typer.echo(json.dumps(answer))
        return
    for line in plan_lines(settled):
        typer.echo(line)
    if rows is not None:
        typer.echo("\n".join(rows.lines()))


def render_or_exit(loaded: LoadedRun, image: str | None, *, as_json: bool) -> None:
    """Print the submission document of a first attempt; a breach of the contract ends with 1."""
    from flows.commands.run import say_error
    from runtime.errors import RunError
    from runtime.launch.rendering import rendered

    try:
        typer.echo(rendered(loaded, image=image))
    except RunError as error:
        say_error(error, as_json=as_json)
        raise typer.Exit(1) from error


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan for a person; ends with what was not checked."""
    yield f"{plan.name}  ({plan.run_file})"
    yield from _table("topology", _topology(plan))
    yield from _table("batches", _batches(plan))
    yield from _table("schedule", _schedule(plan))
    yield from _table(
        "settled", [(each.field, f"{each.value}  <- {each.reason}") for each in plan.settled]
    )
    if plan.memory is not None:
        yield from _table("memory", _memory(plan))
    yield from _table("paths", [(name, str(path)) for name, path in plan.paths.items()])
    yield from _table(
        "identity",
        [
            ("training digest", plan.training_digest),
            ("layout digest", plan.layout_digest),
            ("image", plan.image or "none: this checkout and its environment"),
        ],
    )
    yield from _list("warnings", plan.warnings)
    yield from _list("not available yet", [_without_prefix(each) for each in plan.not_available])
    yield from _list("not checked", plan.not_checked)


def _without_prefix(line: str) -> str:
    return line.partition(": ")[2]


def _topology(plan: Plan) -> list[tuple[str, str]]:
    top = plan.topology
    where = f"{top.gpus_per_replica} GPUs" if top.gpus_per_replica else "CPU"
    sizes = (
        f"data {top.data} x tensor {top.tensor} x pipeline {top.pipeline} x context {top.context}"
    )
    rows = [
        ("nodes", f"{top.replicas} x {where}"),
        ("trainer", f"{top.trainer_ranks} ranks = {sizes}, expert {top.expert}"),
        ("engines", f"{top.engines}, {top.engine_gpus or 'no'} GPUs"),
    ]
    if top.judge_gpus:
        rows.append(("judges", f"{top.judge_gpus} GPUs"))
    return rows


def _batches(plan: Plan) -> list[tuple[str, str]]:
    batch = plan.batch
    low, high = batch.expected_staleness
    product = f"{batch.groups_per_collection} groups x {batch.samples_per_prompt} samples"
    updates = f"{batch.updates_per_collection} updates of {batch.samples_per_update}"
    return [
        ("collection", f"{product} = {batch.samples_per_collection} samples, {updates}"),
        ("in flight", f"{plan.concurrency} samples over {batch.serving_slots} serving slots"),
        ("unconsumed", f"at most {batch.staleness_bound_groups} groups"),
        ("staleness", f"{low} expected where the trainer waits, {high} where groups wait"),
        ("longest", f"{batch.longest_sequence_tokens} tokens"),
    ]


def _schedule(plan: Plan) -> list[tuple[str, str]]:
    schedule = plan.schedule
    if schedule.updates is None:
        return [("updates", "until the data's epochs are done")]
    return [
        ("updates", f"{schedule.updates} in {schedule.collections} collections"),
        ("commits", _updates(schedule.num_commits, schedule.commits)),
        ("evaluations", _updates(schedule.num_evaluations, schedule.evaluations)),
        ("export", "after the last commit" if schedule.export else "none"),
    ]


def _updates(count: int | None, updates: list[int]) -> str:
    if not count:
        return "none"
    shown = [str(update) for update in updates[:8]] + (["..."] if count > 8 else [])
    return f"{count}, at {' '.join(shown)}"


def _memory(plan: Plan) -> list[tuple[str, str]]:
    memory = plan.memory
    if memory is None:
        return []
    weights = f"{gib(memory.engine_weights_bytes_per_gpu)} of weights a device"
    return [
        ("parameters", f"{memory.parameters:,}, weights {gib(memory.weights_bytes)}"),
        ("trainer", f"{gib(memory.trainer_bytes_per_rank)} a rank"),
        ("a full row", f"{gib(memory.activation_bytes_per_rank)} of activations a rank"),
        ("staged copy", f"{gib(memory.staged_bytes_per_node)} of host memory a node"),
        ("engine", f"{weights}, {memory.kv_bytes_per_token:,} bytes of KV a token"),
        ("assumed", "; ".join(memory.assumptions)),
    ]


def _table(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"\n{title}"
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"  {name:<{width}}  {value}"


def _list(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"\n{title}"
        for line in lines:
            yield f"  - {line}"
