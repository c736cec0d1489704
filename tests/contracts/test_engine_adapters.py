"""Adapters over the weights an engine started with: what is served, named, refused and listed."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.publication.checksum import checksums
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.generating import LONG, generate
from tests.contracts.tiny_models import reference_after_swap, reference_logprobs
from tests.contracts.weights import engine_checksums, swap_from_disk, tensors

pytestmark = [
    pytest.mark.anyio,
    only_on("embedded", "SGLang keeps a request's adapter for its life and lists no checksums"),
]

PREFIX = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "bias": "none"}
EMBEDDING = "model.embed_tokens.weight"
Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def make_adapter(models: Models, folder: Path, *layers: str, seed: int = 0) -> Path:
    made = torch.Generator().manual_seed(seed)
    parts: dict[str, torch.Tensor] = {}
    for layer in layers:
        out, into = models.models["a"].get_submodule(layer).weight.shape
        parts[f"{PREFIX}{layer}.lora_A.weight"] = torch.randn(4, into, generator=made) * 0.3
        parts[f"{PREFIX}{layer}.lora_B.weight"] = torch.randn(out, 4, generator=made) * 0.3
    return write(folder, parts)


def write(folder: Path, parts: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def parts_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def merged(models: Models, folder: Path) -> Any:
    """The model with the adapter in its weights, by other means than the engine's."""
    model = copy.deepcopy(models.models["a"])
    parts = parts_of(folder)
    with torch.no_grad():
        for name in parts:
            if name.endswith(".lora_A.weight"):
                stem = name.removesuffix(".lora_A.weight")
                update = parts[f"{stem}.lora_B.weight"] @ parts[name]
                model.get_submodule(stem.removeprefix(PREFIX)).weight.add_(update, alpha=2.0)
    return model


async def load(engine: RunningEngine, name: str, folder: Path, **fields: object):
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    return await engine.post("/load_lora_adapter", body)


async def sample(engine: RunningEngine, **fields: object) -> Any:
    answer = await engine.post("/generate", generate(return_logprob=True, **fields))
    assert answer.status == 200
    return answer.body


def assert_drawn_from(model: Any, found: Any) -> None:
    logprobs = torch.tensor([t[0] for t in found["meta_info"]["output_token_logprobs"]])
    want = reference_logprobs(model, [1, 2, 3], found["output_ids"])
    torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=1e-5)


async def test_an_adapter_serves_what_the_merged_model_would(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    folder = make_adapter(models, tmp_path / "x", Q0, DOWN1)
    answer = await load(engine_server, "e1.u1", folder)
    assert (answer.status, answer.body["success"]) == (200, True)
    assert answer.body["loaded_adapters"] == {"e1.u1": str(folder)}

    found = await sample(engine_server)
    assert found["meta_info"]["weight_version"] == "e1.u1"
    assert_drawn_from(merged(models, folder), found)
    with pytest.raises(AssertionError):
        assert_drawn_from(models.models["a"], found)
    want = checksums({**tensors(models, "a"), **parts_of(folder)}.items())
    assert await engine_checksums(engine_server) == want


async def test_the_next_adapter_takes_its_place_and_none_is_the_base(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    base = await engine_checksums(engine_server)
    first = make_adapter(models, tmp_path / "x", Q0, DOWN1)
    second = make_adapter(models, tmp_path / "y", DOWN1, seed=1)
    await load(engine_server, "first", first)
    for file in first.iterdir():
        file.write_bytes(b"written over")  # it was copied
    await load(engine_server, "second", second)
    assert_drawn_from(merged(models, second), await sample(engine_server))

    unknown = await engine_server.post("/unload_lora_adapter", {"lora_name": "first"})
    assert (unknown.status, unknown.body["success"]) == (400, False)
    assert (await engine_server.post("/unload_lora_adapter", {"lora_name": "second"})).status == 200
    found = await sample(engine_server)
    assert_drawn_from(models.models["a"], found)
    assert found["meta_info"]["weight_version"] == "default"
    assert await engine_checksums(engine_server) == base


async def test_weights_beside_adapters_are_replaced_whole_under_all_their_names(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    """The embedding is tied: the format lists it for each module that uses it."""
    folder = make_adapter(models, tmp_path / "x", Q0)
    other = tensors(models, "b")[EMBEDDING]
    whole = {PREFIX + EMBEDDING: other, f"{PREFIX}lm_head.weight": other.clone()}
    parts = {**parts_of(folder), **whole}
    write(folder, parts, modules_to_save=["embed_tokens", "lm_head"])
    assert (await load(engine_server, "v1", folder)).status == 200

    model = merged(models, make_adapter(models, tmp_path / "y", Q0))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(other)
    assert_drawn_from(model, await sample(engine_server))
    base = tensors(models, "a")
    del base[EMBEDDING]
    assert await engine_checksums(engine_server) == checksums({**base, **parts}.items())

    await load(engine_server, "v2", make_adapter(models, tmp_path / "z", Q0))
    sums = await engine_checksums(engine_server)
    assert sums[EMBEDDING] == checksums([("", tensors(models, "a")[EMBEDDING])])[""]

    parts[f"{PREFIX}lm_head.weight"] = other + 1.0
    await load(engine_server, "v3", write(folder, parts))
    answer = await engine_server.post("/weights_checker", {"action": "checksum"})
    assert answer.status == 400, "two values for one weight cannot both be served"


async def test_running_requests_go_on_in_place_and_tell_both_policies(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    folder = make_adapter(models, tmp_path / "x", Q0, DOWN1)
    await engine_server.post("/update_weight_version", {"new_version": "v1"})
    async with engine_server.stream({**LONG, "rid": "r"}) as running:
        await running.tokens(5)
        await engine_server.post("/pause_generation", {"mode": "in_place"})
        assert (await load(engine_server, "v2", folder, flush_cache=False)).status == 200
        await engine_server.post("/continue_generation")
        while (event := await running.next())["meta_info"]["weight_version"] != "v2":
            pass
        await running.tokens(len(event["output_ids"]) + 4)
        await engine_server.post("/abort_request", {"rid": "r"})
        last = await running.last()
    first, second = last["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("v1", "v2")
    output, swap = last["output_ids"], second["start"]
    assert first["end"] == swap
    found = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    old = models.models["a"]
    before = reference_logprobs(old, [1, 2, 3], output[:swap])
    torch.testing.assert_close(found[:swap], before, atol=1e-4, rtol=0)
    after = reference_after_swap(old, merged(models, folder), [1, 2, 3], output, swap)
    torch.testing.assert_close(found[swap:], after, atol=1e-4, rtol=0)


async def test_a_prefix_read_under_one_adapter_is_never_served_by_another(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    for seed in (0, 1):
        folder = make_adapter(models, tmp_path / f"{seed}", Q0, seed=seed)
        await load(engine_server, f"v{seed}", folder, flush_cache=False)
        for cached in (0, 2):
            found = await sample(engine_server, extra_key="same")
            assert found["meta_info"]["cached_tokens"] == cached
            assert_drawn_from(merged(models, folder), found)


def _no_half(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    del parts[f"{PREFIX}{Q0}.lora_B.weight"]
    return {}


def _other_rank(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    parts[f"{PREFIX}{Q0}.lora_A.weight"] = torch.zeros(3, 32)
    return {}


def _no_such_layer(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    for half in "AB":
        parts[f"{PREFIX}model.norm.lora_{half}.weight"] = torch.zeros(4, 4)
    return {}


def _tied(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    parts[f"{PREFIX}lm_head.lora_A.weight"] = torch.zeros(4, 32)
    parts[f"{PREFIX}lm_head.lora_B.weight"] = torch.zeros(261, 4)
    return {}


def _twice(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    parts[f"{PREFIX}{Q0}.weight"] = torch.zeros(32, 32)
    return {}


def _foreign_name(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    parts["q_proj"] = torch.zeros(1)
    return {}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_half, "one half"),
        (_other_rank, "does not fit"),
        (_no_such_layer, "no weight of a linear layer"),
        (_tied, "of its own"),
        (_twice, "replaced too"),
        (_foreign_name, "no name of peft's"),
        (lambda _: {"use_dora": True}, "use_dora"),
        (lambda _: {"r": 0}, "adapter_config.json"),
        (lambda _: {"r": 16}, "at rank 16"),
        (lambda _: {"r": -4}, "no adapter"),
        (lambda _: {"lora_alpha": float("inf")}, "no adapter"),
        (lambda _: {"lora_alpha": 10**400}, "adapter_config.json"),
        (lambda _: {"peft_type": "IA3"}, "IA3"),
    ],
)
async def test_an_adapter_that_does_not_fit_changes_nothing(
    engine_server: RunningEngine, models: Models, tmp_path: Path, spoil: Any, words: str
):
    good = make_adapter(models, tmp_path / "good", Q0)
    await load(engine_server, "v1", good)
    before = await engine_checksums(engine_server)
    parts = parts_of(make_adapter(models, tmp_path / "bad", Q0, DOWN1, seed=1))
    config = spoil(parts)
    answer = await load(engine_server, "v2", write(tmp_path / "bad", parts, **config))
    assert (answer.status, answer.body["success"]) == (400, False)
    assert words in answer.body["error_message"]
    assert await engine_checksums(engine_server) == before
    assert (await engine_server.get("/model_info")).body["weight_version"] == "v1"


async def test_a_torn_or_missing_folder_is_refused(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    torn = make_adapter(models, tmp_path / "torn", Q0)
    file = torn / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    for folder in (torn, tmp_path / "nowhere"):
        assert (await load(engine_server, "v1", folder)).status == 400
    assert (await engine_server.get("/model_info")).body["weight_version"] == "default"


async def test_weights_are_not_updated_under_an_adapter(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    await load(engine_server, "v1", make_adapter(models, tmp_path / "x", Q0))
    before = await engine_checksums(engine_server)
    await engine_server.post("/begin_weight_update")
    for answer in (
        await swap_from_disk(engine_server, str(models.folders["b"]), "v2"),
        await engine_server.post("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        await engine_server.post("/update_weights_from_distributed", {"names": []}),
    ):
        assert answer.status == 400
        assert "unload it" in answer.body["message"]
    assert await engine_checksums(engine_server) == before


async def test_a_request_may_name_the_loaded_adapter_and_no_other(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    await load(engine_server, "v1", make_adapter(models, tmp_path / "x", Q0))
    for name, status in (("v1", 200), (["v1"], 200), ("v0", 400), (["v0"], 400)):
        body = generate(lora_path=name)
        assert (await engine_server.post("/generate", body)).status == status


async def test_loads_and_requests_at_once_leave_every_token_with_its_own_adapter(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    """Nobody pauses; each response is wholly or piece by piece of the versions it names."""
    folders = [make_adapter(models, tmp_path / f"{i}", Q0, DOWN1, seed=i) for i in range(2)]
    by_name = {f"v{i}": merged(models, folder) for i, folder in enumerate(folders)}
    await load(engine_server, "v0", folders[0])

    async def swaps() -> None:
        for i in (1, 0, 1, 0):
            name = f"v{i}"
            assert (await load(engine_server, name, folders[i], flush_cache=False)).status == 200

    answers, _ = await asyncio.gather(
        asyncio.gather(*(sample(engine_server) for _ in range(12))), swaps()
    )
    answers.append(await sample(engine_server))  # the others may all have met a swap
    whole = [a for a in answers if len(a["meta_info"]["weight_versions"]) == 1]
    for answer in whole:
        assert_drawn_from(by_name[answer["meta_info"]["weight_version"]], answer)
