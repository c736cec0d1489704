"""What a scheduler's job starts: ``python -m runtime.launch.entry``, on every replica.

It reads the payload of its environment and nothing of the submitter's. The leader writes the
attempt down, makes sure that it is the one, and becomes the guard.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import RunError
from runtime.launch.attempts import differences
from runtime.launch.freezing import freeze
from runtime.launch.submission import CODE_VARIABLE, PAYLOAD_VARIABLE, Payload
from runtime.rundir import atomic
from runtime.rundir.claims import claim_attempt
from runtime.rundir.layout import CODE, AttemptDir, RunRoot

_HERE = Path(__file__).resolve().parents[2]
_RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Would give the working folder of the job to every process of the session."""

EXIT_REFUSED = 4
"""The attempt is another launcher's, or this job cannot run it; nothing was started."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Begin the attempt; does not return where it becomes the guard."""
    try:
        payload = Payload.decode(environ.get(PAYLOAD_VARIABLE, ""))
        from runtime.launch.group import Group, lead, serve

        group = Group.of(environ, backend=payload.claim.launcher)
        attempt = RunRoot(payload.root).attempt(payload.attempt)
        settled = _preflight(payload, environ)
        if group.rank != 0:
            return serve(group, attempt, payload, settled)
        take(attempt, payload)
        if environ.get(CODE_VARIABLE):
            settled |= keep_code(attempt, environ)
        if group.size > 1:
            settled |= lead(group, attempt, payload)
    except RunError as error:
        return _refuse(error)
    become_guard(attempt, settled)
    raise AssertionError("exec does not return")


def take(attempt: AttemptDir, payload: Payload) -> None:
    """Make the attempt ours: claimed by our launcher, with our files in it. Idempotent.

    A scheduler's own retry of a job finds everything there and begins a new epoch of it.

    Raises:
        ConfigError: if another launcher claimed the number for another run file.
    """
    from runtime.errors import ConfigError

    attempt.root.create()
    standing = claim_attempt(attempt, payload.claim)
    if standing.spec_digest != payload.claim.spec_digest:
        theirs = atomic.read_bytes(attempt.run) or b"{}"
        named = "; ".join(differences(payload.run, theirs.decode()))
        raise ConfigError(
            f"attempt {attempt.number} of {attempt.root.path} was claimed by "
            f"{standing.launcher} for another run file: {named}"
        )
    if not attempt.attempt.exists():
        freeze(attempt, payload.run, payload.plan, payload.order)


def keep_code(attempt: AttemptDir, environ: Mapping[str, str]) -> dict[str, str]:
    """Copy the code that travelled with the job into the attempt, for all of its processes.

    Ray deletes a job's working folder when it thinks that nobody needs it; and all nodes see the
    output root. Idempotent.
    """
    code = attempt.code
    if not code.is_dir():
        made = attempt.path / f".{CODE}.{os.getpid()}"
        ignored = shutil.ignore_patterns("__pycache__", ".git", "runs", "tests")
        shutil.copytree(_HERE, made, ignore=ignored)
        try:
            made.rename(code)
        except OSError:  # a start of the same job was faster
            shutil.rmtree(made, ignore_errors=True)
    os.chdir(code)
    others = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(_HERE)]
    return {"PYTHONPATH": os.pathsep.join((str(code), *others))}


def become_guard(attempt: AttemptDir, settled: Mapping[str, str | None]) -> None:
    """Replace this process by the guard: the scheduler's signals reach it, and its exit is ours."""
    argv = [sys.executable, "-m", "runtime.session.guard", str(attempt.path)]
    from runtime.launch.preflight import corrected

    env = corrected(os.environ, settled)
    for name in (PAYLOAD_VARIABLE, CODE_VARIABLE, _RAY_JOB_CONFIG):
        env.pop(name, None)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, argv, env)


def _preflight(payload: Payload, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The environment as corrected for this host; only jobs with GPUs are looked at."""
    from configs.plan import Plan

    plan = Plan.model_validate_json(payload.plan)
    if plan.topology.total_gpus == 0:
        return {}
    from runtime.launch.preflight import preflight

    return preflight(plan, environ=environ, root=Path(payload.root))


def _refuse(error: RunError) -> int:
    sys.stderr.write(f"milepost: {error.message}\nlook at: {error.next_check}\n")
    return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
