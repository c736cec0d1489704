"""`milepost export RUN --update N`: any commit as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.commands._run_file import AsJson, Debug
from flows.commands._run_name import RunName, find_or_exit
from runtime.rundir.layout import RunRoot

Update = Annotated[int, typer.Option("--update", min=0, help="Update of a commit.")]
Upload = Annotated[
    str | None, typer.Option("--upload", metavar="URL", help="Also copy it to s3://bucket/prefix.")
]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(export)


def export(
    run: RunName,
    update: Update,
    upload: Upload = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export the commit of an update into export-<update>/, verified; the run may be going on.

    Runs here, on one rank, from the files alone; an export that stands and is whole is kept.
    0: it stands; 1: refused, or there was no room; 2 wrong usage.
    """
    from flows.commands.run import errors_said

    place = find_or_exit(run, as_json=as_json)
    with errors_said(as_json=as_json, debug=debug):
        answer = _export(place.root, update, upload)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(
            f"{answer['policy']}: {answer['num_tensors']} tensors, {answer['num_bytes']} bytes in "
            f"{answer['path']}" + (f", and in {upload}" if upload else "")
        )


def _export(root: RunRoot, update: int, upload: str | None) -> dict[str, object]:
    import anyio

    from runtime.checkpoints.bucket import Bucket
    from runtime.checkpoints.export_upload import upload_export
    from runtime.checkpoints.from_commit import export_update
    from runtime.errors import ConfigError
    from runtime.launch.resume import frozen_run
    from runtime.session.preparing import Prepared

    spec = frozen_run(root).spec
    prepared = Prepared.read(root)
    if prepared is None:
        raise ConfigError(f"{root.path} was never prepared: there is nothing to export")
    bucket = Bucket.of(upload) if upload is not None else None

    async def make() -> dict[str, object]:
        receipt = await export_update(root, spec, model=Path(prepared.model), update=update)
        return receipt.model_dump(mode="json", exclude={"checksums", "files"})

    answer = anyio.run(make) | {"path": str(root.export_at(update)), "uploaded": upload}
    if bucket is not None:
        upload_export(root.export_at(update), bucket)
    return answer
