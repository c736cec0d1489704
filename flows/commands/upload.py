"""`milepost upload RUN`: the newest commit into the object store that the run file names."""

from __future__ import annotations

import json

import typer

from flows.commands._run_file import AsJson, Debug
from flows.commands._run_name import RunName, find_or_exit
from runtime.rundir.layout import RunRoot


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(upload)


def upload(run: RunName, as_json: AsJson = False, debug: Debug = False) -> None:
    """Copy the newest commit, and all it needs, to checkpoint.upload; what is there is not sent.

    A session does so by itself; this is for the end of a run at which the store was away.
    0: the copy is whole; 1: refused, or the store did not take it; 2 wrong usage.
    """
    from flows.commands.run import errors_said

    place = find_or_exit(run, as_json=as_json)
    with errors_said(as_json=as_json, debug=debug):
        answer = _upload(place.root)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{answer['policy']}: whole in {answer['store']}, {answer['num_bytes']} sent")


def _upload(root: RunRoot) -> dict[str, object]:
    from runtime.checkpoints.bucket import Bucket
    from runtime.checkpoints.upload import copy_commit
    from runtime.errors import ConfigError
    from runtime.launch.resume import frozen_run
    from runtime.rundir import history
    from runtime.rundir.chain import Chain

    checkpoint = frozen_run(root).spec.checkpoint
    if checkpoint.upload is None:
        raise ConfigError(
            f"the run file of {root.path} has no checkpoint.upload: no store is named"
        )
    commit = history.newest_commit(Chain(root).read())
    if commit is None:
        raise ConfigError(f"{root.path} holds no commit yet: there is nothing to copy")
    bucket = Bucket.of(checkpoint.upload)
    sent = copy_commit(root, bucket, commit, keep=checkpoint.keep)
    return {"policy": commit.policy, "store": str(bucket), "num_bytes": sent}
