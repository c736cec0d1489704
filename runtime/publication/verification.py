"""Does an engine hold exactly the trainer's weights: every tensor, by name and checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.engines.protocol import WeightHash
from runtime.errors import ContractViolation, EngineError
from runtime.publication.protocol import Snapshot


def check_snapshot(snapshot: Snapshot) -> None:
    """Refuse a snapshot that could verify nothing.

    Raises:
        ContractViolation: if it is empty, or its counts and checksums disagree.
    """
    if snapshot.num_tensors == 0 or snapshot.num_bytes == 0:
        raise ContractViolation(f"the snapshot of {snapshot.policy} holds no weights")
    if not snapshot.digests:
        raise ContractViolation(f"the snapshot of {snapshot.policy} has no digests")
    for kind, digests in snapshot.digests.items():
        if len(digests) != snapshot.num_tensors:
            raise ContractViolation(
                f"the snapshot of {snapshot.policy} counts {snapshot.num_tensors} tensors "
                f"and has {len(digests)} digests by {kind}"
            )


def check_held(snapshot: Snapshot, held: Mapping[str, str], kind: WeightHash = "sha256") -> None:
    """Compare what an engine holds with what left the trainer.

    A tensor's checksum covers all of its bytes, so equal checksums under equal names are equal
    counts and equal bytes. An extra name on the engine is a weight that was not published: refused
    too.

    Args:
        snapshot: what was published.
        held: what the engine answered.
        kind: the hash it answers with.

    Raises:
        EngineError: if anything differs; names up to three tensors of each kind.
    """
    right_ones = snapshot.digests.get(kind)
    if right_ones is None:
        raise EngineError(
            f"the snapshot of {snapshot.policy} has no digests by {kind}: this engine can be "
            "verified at the next publication"
        )
    missing = [name for name in right_ones if name not in held]
    extra = [name for name in held if name not in right_ones]
    other = [name for name, checksum in right_ones.items() if held.get(name, checksum) != checksum]
    if not (missing or extra or other):
        return
    right = len(right_ones) - len(missing) - len(other)
    raise EngineError(
        f"{right} of {len(right_ones)} tensors of {snapshot.policy} were verified: "
        f"missing {_some(missing)}, not published {_some(extra)}, other bytes {_some(other)}",
        num_missing=len(missing),
        num_extra=len(extra),
        num_other=len(other),
    )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "0"
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} ({', '.join(names[:3])}{more})"
