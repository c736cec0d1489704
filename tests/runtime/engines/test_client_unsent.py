"""What the client refuses before it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from runtime.errors import (
    ContractViolation,
    EngineRefused,
    PartialWrite,
)
from runtime.policy import PolicyId
from tests.contracts.tiny_models import VOCAB
from tests.runtime.engines.raw_servers import client, http, raw_server, request

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_requests_that_kill_upstreams_server_are_not_sent():
    async with raw_server() as server, client(server.url, vocab_size=VOCAB) as made:
        for ids in ((1, VOCAB), (-1,), (9_999_999,)):
            with pytest.raises(ContractViolation, match="outside the vocabulary"):
                await made.generate(request(ids), deadline_s=10)
        whole = save({"w": torch.zeros(3)})
        for payload in (b"", b"AAAA", b"\x80\x04.", whole[:-1], whole + b"x"):
            with pytest.raises(ContractViolation, match="safetensors"):
                await made.update_from_tensors(payload, policy=None, flush=False)
        assert server.num_requests == 0


async def test_a_folder_that_is_not_whole_is_not_sent(tmp_path: Path):
    """SGLang's whole server ends on a torn file. Cut here at each kind of place."""
    whole = save({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.uint8)})
    path, header_end = tmp_path / "model.safetensors", 8 + int.from_bytes(whole[:8], "little")
    answer = http(200, {"success": True, "message": "Succeeded to update model weights."})
    async with raw_server(answer) as server, client(server.url) as made:
        for cut in (0, 4, 8, header_end - 1, header_end, header_end + 4, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(PartialWrite, match=r"model\.safetensors"):
                await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        path.unlink()
        with pytest.raises(PartialWrite, match="no weights"):
            await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        assert server.num_requests == 0
        path.write_bytes(whole)
        await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        assert server.num_requests == 1


async def test_a_flush_after_retraction_is_not_sent():
    async with raw_server(http(200, {"status": "ok"})) as server, client(server.url) as made:
        await made.pause("retract")
        with pytest.raises(EngineRefused, match="retract"):
            await made.update_from_disk("/x", PolicyId(1, 1), flush=True)
        with pytest.raises(EngineRefused):
            await made.update_from_tensors(
                save({"w": torch.zeros(3)}), policy=PolicyId(1, 1), flush=True
            )
        with pytest.raises(EngineRefused):
            await made.update_from_distributed([], group="g", policy=None, flush=True)
        assert server.num_requests == 1
