"""Records of a chain, short to write."""

from runtime.policy import PolicyId
from runtime.rundir.records import CommitRecord, EpochRecord, FileEntry, Record


def epoch(number: int, restored: CommitRecord | None = None, reason: str = "drill") -> EpochRecord:
    return EpochRecord.model_validate(
        {
            "epoch": number, "time": 0.0, "attempt": number, "host": "h", "pid": 1,
            "boot_id": "b", "started": 1.0, "reason": reason,
            "restored": restored.policy if restored else None,
            "restored_seq": restored.seq if restored else None,
            "lease_s": 30.0 if number == 1 else None,
        }
    )  # fmt: skip


def commit(number: int, update: int, *, state: str = "a", digest: str = "c") -> CommitRecord:
    file = FileEntry(name="trainer-00000-of-00001.safetensors", size=3, sha256=state * 64)
    return CommitRecord.model_validate(
        {
            "epoch": number, "time": 0.0, "format_version": 1, "update": update,
            "policy": str(PolicyId(number, update)), "training_digest": "t", "layout": {},
            "data_fingerprint": "d", "ledger_checksum": "l", "consumed_digest": digest,
            "folder": f"checkpoints/{update:06d}-e{number}", "files": (file,),
        }
    )  # fmt: skip


def chain(*records: Record) -> tuple[Record, ...]:
    return tuple(r.model_copy(update={"seq": i}) for i, r in enumerate(records))
