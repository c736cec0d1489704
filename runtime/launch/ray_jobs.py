"""The Ray backend: the guard is a job of a running cluster, through its Jobs API.

Spoken over HTTP: whoever submits needs no Ray, and every call has a deadline of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
from pydantic import SecretStr

from configs.address import why_no_address
from configs.names import read_variable
from runtime.errors import ConfigError, CredentialsRefused, LaunchRefused, ServiceUnavailable
from runtime.launch.backend import Submitted
from runtime.launch.package import Package, pack_checkout
from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.submission import CODE_VARIABLE, ENTRY, Submission

CALL_DEADLINE_S = 20.0
_SUBMITS = 4.5
"""So many deadlines of a call: the job's environment is set up before the answer."""
MARK = "mark"
"""In a job's metadata: ``Submission.mark``."""
_RAW = {
    "PENDING": AttemptClass.PENDING,
    "RUNNING": AttemptClass.RUNNING,
    "SUCCEEDED": AttemptClass.SUCCEEDED,
    "STOPPED": AttemptClass.CANCELED,
}


class RayJobs:
    """Implements LaunchBackend over the job server of a Ray cluster."""

    name = "ray"

    def __init__(
        self,
        address: str,
        *,
        token: SecretStr | None = None,
        checkout: Path | None = None,
        metadata: Mapping[str, str] | None = None,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            address: ``http://host:8265``.
            token: the cluster's; None: it has none.
            checkout: sent along where the run names no image; None: this Milepost's own.
            metadata: added to every job, for whoever looks at the dashboard.
            deadline_s: of every call; what carries files or sets up a job gets longer.
        """
        self._address = address.rstrip("/")
        self._token = token
        self._checkout = checkout or Path(__file__).resolve().parents[2]
        self._metadata = dict(metadata or {})
        self._deadline_s = deadline_s
        self._package: Package | None = None

    @property
    def where(self) -> str:
        """The job server."""
        return self._address

    def render(self, submission: Submission) -> dict[str, Any]:
        """See LaunchBackend: the body of the request."""
        runtime_env: dict[str, Any] = {"env_vars": submission.environment()}
        if submission.image is None:
            runtime_env["working_dir"] = _uri(self._packed())
            runtime_env["env_vars"][CODE_VARIABLE] = "1"
        return {
            "entrypoint": f"python -m {ENTRY}",
            "submission_id": submission.key,
            "runtime_env": runtime_env,
            "metadata": {
                **self._metadata,
                "run": submission.spec.name,
                "attempt": str(submission.payload.attempt),
                MARK: submission.mark,
            },
        }

    def check(self, submission: Submission) -> list[str]:
        """See LaunchBackend."""
        problems: list[str] = []
        if submission.spec.launch.secrets:
            names = ", ".join(submission.spec.launch.secrets)
            problems.append(
                f"launch.secrets ({names}): a Ray cluster keeps no secrets; put them into the "
                "environment of its nodes and leave them out here"
            )
        return problems

    def submit(self, submission: Submission) -> Submitted:
        """See LaunchBackend. A lost answer is settled by looking for the job."""
        key = submission.key
        if (job := self._job(key)) is not None:
            return self._submitted(key, found=job)
        if submission.image is None:
            self._upload(self._packed())
        try:
            self._send("POST", "/api/jobs/", json=self.render(submission), is_long=True)
        except (ServiceUnavailable, LaunchRefused):
            # It may have been taken all the same, or a rival was faster.
            if (job := self._job(key)) is None:
                raise
            return self._submitted(key, found=job)
        return self._submitted(key)

    def job_of(self, key: str) -> str | None:
        """See LaunchBackend: the key is the id."""
        return key

    def look(self, receipt: LaunchReceipt) -> AttemptStanding:
        """See LaunchBackend."""
        job = self._job(receipt.key)
        if job is not None:
            return classify(job)
        if receipt.job is None:
            return AttemptStanding(
                kind=AttemptClass.STOPPED,
                raw="unknown",
                reason="it was never submitted",
                is_known=False,
            )
        return AttemptStanding(
            kind=AttemptClass.INTERRUPTED,
            raw="unknown",
            is_known=False,
            reason=f"the cluster at {self._address} does not know the job: it was started anew",
        )

    def stop(self, receipt: LaunchReceipt) -> None:
        """See LaunchBackend."""
        self._send("POST", f"/api/jobs/{receipt.key}/stop", may_miss=True)

    # -- requests -------------------------------------------------------------------------------

    def _submitted(self, key: str, *, found: Mapping[str, Any] | None = None) -> Submitted:
        metadata = cast("Mapping[str, str]", (found or {}).get("metadata") or {})
        return Submitted(
            job=key,
            was_there=found is not None,
            url=f"{self._address}/#/jobs/{key}",
            mark=metadata.get(MARK),
        )

    def _job(self, key: str) -> dict[str, Any] | None:
        answer = self._send("GET", f"/api/jobs/{key}", may_miss=True)
        return None if answer.status_code == 404 else cast("dict[str, Any]", answer.json())

    def _packed(self) -> Package:
        if self._package is None:
            self._package = pack_checkout(self._checkout)
        return self._package

    def _upload(self, package: Package) -> None:
        path = f"/api/packages/{_uri(package).replace('://', '/')}"
        if self._send("GET", path, may_miss=True).status_code == 404:
            self._send("PUT", path, content=package.content, is_long=True)

    def _send(
        self,
        method: str,
        path: str,
        *,
        may_miss: bool = False,
        is_long: bool = False,
        **body: Any,
    ) -> httpx.Response:
        headers = {}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        try:
            # Proxies of the surroundings are not asked: the token goes to the cluster alone.
            timeout_s = self._deadline_s * (_SUBMITS if is_long else 1)
            with httpx.Client(timeout=timeout_s, trust_env=False) as client:
                answer = client.request(method, self._address + path, headers=headers, **body)
        except httpx.HTTPError as error:
            raise ServiceUnavailable(
                f"the Ray cluster at {self._address} did not answer {method} {path}: "
                f"{type(error).__name__}",
                address=self._address,
            ) from error
        if answer.status_code in (401, 403):
            raise CredentialsRefused(
                f"the Ray cluster at {self._address} wants a token: RAY_AUTH_TOKEN, "
                "RAY_AUTH_TOKEN_PATH, or the token of its block",
                address=self._address,
            )
        if answer.status_code == 404 and may_miss:
            return answer
        if answer.status_code >= 400:
            said = answer.text.strip().splitlines()
            text = f"the Ray cluster at {self._address}: {said[-1][:300] if said else ''}"
            error = LaunchRefused if answer.status_code < 500 else ServiceUnavailable
            raise error(f"{text} ({answer.status_code} to {method} {path})")
        return answer


def classify(job: Mapping[str, Any]) -> AttemptStanding:
    """The class of a job as the Jobs API describes it.

    A guard that exited with a status failed by itself; one that vanished without any was lost with
    its node or its supervisor.
    """
    raw = str(job.get("status"))
    message = str(job.get("message") or "")
    kind = _RAW.get(raw, AttemptClass.STOPPED)
    code = cast("int | None", job.get("driver_exit_code"))
    if raw == "FAILED":
        setup = job.get("error_type") in (
            "RUNTIME_ENV_SETUP_FAILURE",
            "JOB_SUPERVISOR_ACTOR_START_FAILURE",
        )
        is_lost = code is None and not setup
        kind = AttemptClass.INTERRUPTED if is_lost else AttemptClass.FAILED
        raw = f"FAILED ({job.get('error_type') or f'exit {code}'})"
    first = message.splitlines()[0] if message else ""
    return AttemptStanding(kind=kind, raw=raw, reason=first, exit_code=code)


def ray_backend(
    cluster: str | None, *, environ: Mapping[str, str] = os.environ, checkout: Path | None = None
) -> RayJobs:
    """The backend of a run file: its cluster, with the submitter's token.

    Args:
        cluster: ``launch.cluster``, the URL of the job server; None takes ``MILEPOST_RAY_ADDRESS``.
        environ: also ``RAY_AUTH_TOKEN`` or ``RAY_AUTH_TOKEN_PATH``.
        checkout: see RayJobs.

    Raises:
        ConfigError: if no address is known.
    """
    address = cluster or read_variable("RAY_ADDRESS", environ)
    why = why_no_address(address, is_base=True) if address else "no address"
    if not address or why is not None:
        raise ConfigError(
            f"launch.cluster: {why}; a Ray cluster is named by the URL of its job server "
            "(http://host:8265), there or in MILEPOST_RAY_ADDRESS; its token comes from "
            "RAY_AUTH_TOKEN"
        )
    return RayJobs(address, token=ray_token(environ), checkout=checkout)


def ray_token(environ: Mapping[str, str]) -> SecretStr | None:
    """The submitter's token for Ray clusters; None where there is none."""
    if environ.get("RAY_AUTH_MODE") == "disabled":
        return None
    if token := environ.get("RAY_AUTH_TOKEN"):
        return SecretStr(token)
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    if not path:
        return None
    try:
        return SecretStr(Path(path).read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(f"RAY_AUTH_TOKEN_PATH cannot be read: {error.strerror}") from error


def _uri(package: Package) -> str:
    return f"gcs://_ray_pkg_{package.digest[:16]}.zip"
