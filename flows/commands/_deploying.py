"""What a Milepost server holds: work pool, blocks, deployments, automations. All idempotent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

import blocks
import flows
from flows.commands._server import ServerError

POOL = "milepost"
CHECKOUT = "MILEPOST_CHECKOUT"
_DEPLOY_DEADLINE_S = 180.0

Made = Literal["created", "updated", "kept"]


def checkout() -> Path:
    """The folder with prefect.yaml and automations.yaml.

    Raises:
        ServerError: if this Milepost was installed without them.
    """
    folder = Path(flows.__file__).resolve().parent.parent
    if not (folder / "prefect.yaml").is_file():
        raise ServerError(f"no prefect.yaml in {folder}: `milepost up` needs a checkout")
    return folder


async def ensure_pool(client: PrefectClient) -> Made:
    """The process work pool that the deployments name."""
    template = ProcessWorker.get_default_base_job_template()
    try:
        await client.create_work_pool(
            WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template)
        )
    except ObjectAlreadyExists:
        return "kept"
    return "created"


async def register_blocks(client: PrefectClient) -> list[str]:
    """Register every block type of the room; returns their slugs."""
    slugs: list[str] = []
    for name in blocks.__all__:
        block = getattr(blocks, name)
        await block.register_type_and_schema(client=client)
        slugs.append(block.get_block_type_slug())
    return slugs


def deploy(folder: Path, env: Mapping[str, str]) -> None:
    """Deploy everything in prefect.yaml through Prefect's own command.

    Raises:
        ServerError: with what the command said, if it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=folder,
        env={**os.environ, **env, CHECKOUT: str(folder)},
        capture_output=True,
        text=True,
        timeout=_DEPLOY_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise ServerError(f"prefect deploy failed:\n{done.stdout}\n{done.stderr}")


async def deployment_ids(client: PrefectClient, folder: Path) -> dict[str, str]:
    """Ids of the deployments in prefect.yaml, by ``flow/name``."""
    found: dict[str, str] = {}
    for asked in _yaml(folder / "prefect.yaml")["deployments"]:
        flow = str(asked["entrypoint"]).rpartition(".")[2]
        name = f"{flow}/{asked['name']}"
        found[name] = str((await client.read_deployment_by_name(name)).id)
    return found


async def ensure_automations(client: PrefectClient, folder: Path) -> dict[str, dict[str, str]]:
    """Create or update what is in automations.yaml, by name; returns id and what was done."""
    made: dict[str, dict[str, str]] = {}
    for fields in _yaml(folder / "automations.yaml")["automations"]:
        asked = AutomationCore.model_validate(fields)
        standing = await client.read_automations_by_name(asked.name)
        if not standing:
            made[asked.name] = {"id": str(await client.create_automation(asked)), "was": "created"}
            continue
        first = standing[0]
        was: Made = "kept"
        if not _is_same(asked, first):
            await client.update_automation(first.id, asked)
            was = "updated"
        made[asked.name] = {"id": str(first.id), "was": was}
    return made


def _is_same(asked: AutomationCore, standing: Automation) -> bool:
    """Compared as models, so that neither the order of a set nor a default makes a difference."""
    stored = standing.model_dump(include=set(AutomationCore.model_fields))
    return _plain(asked) == _plain(AutomationCore.model_validate(stored))


def _plain(automation: AutomationCore) -> dict[str, Any]:
    fields = automation.model_dump(exclude_none=True)
    fields["trigger"].pop("id", None)
    return fields


def _yaml(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", yaml.safe_load(path.read_text(encoding="utf-8")))
