"""The pause by abort inside a SGLang server, without the second upstream waits."""

from __future__ import annotations

from types import SimpleNamespace

import anyio

from runtime.engines.sglang.inside import pauses


class Lock:
    """Held until the last aborted request was answered."""

    def __init__(self, aborts_needed: int) -> None:
        self.left = aborts_needed

    async def is_locked(self) -> bool:
        return self.left > 0


class TokenizerManager:
    """What the hook touches, as upstream has it."""

    def __init__(self, aborts_needed: int) -> None:
        self.is_pause_cond = anyio.Lock()
        self.is_pause = False
        self.model_update_lock = Lock(aborts_needed)
        self.told: list[str] = []

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        assert self.is_pause, "whatever came now would run"
        self.told.append("abort")
        self.model_update_lock.left -= 1

    async def pause_generation(self, obj) -> None:
        self.told.append(f"upstream {obj.mode}")


def test_an_abort_ends_with_the_last_answer_and_other_modes_are_upstreams(monkeypatch):
    manager = SimpleNamespace(TokenizerManager=type("Hooked", (TokenizerManager,), {}))
    pauses.hook_pauses(manager)
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(pauses.asyncio, "sleep", sleep)

    async def main():
        busy, idle = manager.TokenizerManager(4), manager.TokenizerManager(1)
        await busy.pause_generation(SimpleNamespace(mode="abort"))
        assert busy.told == ["abort"] * 4
        assert waited == [pauses.POLL_S] * 3
        await idle.pause_generation(SimpleNamespace(mode="abort"))
        assert len(waited) == 3
        await idle.pause_generation(SimpleNamespace(mode="in_place"))
        assert idle.told == ["abort", "upstream in_place"]

    anyio.run(main)
