"""How weights get from the trainer to the engines, as the run file and its nodes have it."""

from __future__ import annotations

from pathlib import Path

from runtime.publication.adapter import AdapterTransport
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.disk import DiskTransport
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import PublicationTransport
from runtime.publication.transaction import Publisher
from runtime.rollout.settings import drain_deadline_s
from runtime.session.context import Context
from runtime.session.ground import Ground
from runtime.session.nodes import Nodes
from runtime.session.publishing import Publishing, publication_limits
from runtime.session.serving import Engines
from runtime.trainer.group import TrainerGroup


def make_publishing(
    ground: Ground, engines: Engines, trainer: TrainerGroup, nodes: Nodes
) -> Publishing:
    """Publisher, transport and mode of this run; nothing is published yet."""
    context = ground.context
    spec = context.spec

    async def kill(slot: int, incarnation: str, reason: str) -> None:
        await engines.monitor.kill(slot, incarnation, reason)

    return Publishing(
        publisher=Publisher(
            transport=_transport(context, trainer, nodes),
            kill=kill,
            record_path=context.root.path / "publications.jsonl",
            limits=publication_limits(
                spec.rollout.drain_deadline,
                None if context.plan.memory is None else context.plan.memory.weights_bytes,
            ),
            pause=spec.core.refresh_pause,
            clock=context.clock,
        ),
        pool=engines.pool,
        monitor=engines.monitor,
        gate=engines.gate,
        mode=spec.core.publication_mode,
        drain_deadline_s=drain_deadline_s(spec),
        lifecycle=ground.recorder.lifecycle,
        sleeps=spec.rollout.sleep,
    )


def _transport(context: Context, trainer: TrainerGroup, nodes: Nodes) -> PublicationTransport:
    diagnostics = Diagnostics.from_environment()
    if context.spec.lora.publishes_adapter:
        root = _shared_scratch(context, nodes)
        return AdapterTransport(trainer, root, diagnostics=diagnostics)
    match context.plan.publication_transport:
        case "disk":
            root = _shared_scratch(context, nodes)
            return DiskTransport(trainer, root, diagnostics=diagnostics)
        case "ipc":
            return IpcTransport(trainer, diagnostics=diagnostics)
        case _:
            return BroadcastTransport(
                trainer,
                host=nodes.address(0),
                backend="nccl" if context.plan.topology.trainer_gpus else "gloo",
                ranks_per_engine=context.spec.rollout.tensor,
                diagnostics=diagnostics,
            )


def _shared_scratch(context: Context, nodes: Nodes) -> Path | None:
    """Memory of this host where everything runs on it; else a folder that all nodes see."""
    if not nodes.nodes:
        return None
    folder = context.root.path / "scratch"
    folder.mkdir(exist_ok=True)
    return folder
