"""Attention and products that kernel libraries take over: the same numbers, and who may have them.

On a CPU the operations run their plain forms; on a GPU that flash-attn-4 and quack-kernels are for,
the same tests hold those.
"""

import os
import stat
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import Qwen3ForCausalLM

from runtime.errors import ConfigError
from runtime.trainer.packing import Unit, by_tokens
from runtime.trainer.settings import TrainerSettings
from runtime.trainer.torch import cute
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.compiled import kind_of
from runtime.trainer.torch.cute_check import attention_errors, product_errors
from runtime.trainer.torch.flash import flash
from runtime.trainer.torch.gate import gated_product
from runtime.trainer.torch.head import chunked_logprobs
from runtime.trainer.torch.layout import pack_row
from runtime.trainer.torch.packer import Packer
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.scorer import load_scorer
from tests.runtime.trainer.tiny import make_sequences, tiny_config

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else None
REASON = "no GPU" if GPU is None else cute.missing(GPU, torch.bfloat16)
needs_cute = pytest.mark.skipif(REASON is not None, reason=str(REASON))
no_deadline = settings(deadline=None, max_examples=25)


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads and a vocabulary of sizes that kernels are made for."""
    folder = tmp_path_factory.mktemp("larger")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        config = tiny_config(head_dim=64, vocab_size=64, initializer_range=0.1)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@no_deadline
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5)).filter(lambda x: x[0] + x[1] > 0),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    seed=st.integers(0, 99),
)
def test_flash_is_causal_attention_within_sequences(
    lengths: list[tuple[int, int]], heads: tuple[int, int], seed: int
) -> None:
    """Against torch's own, sequence by sequence; queries may be fewer than keys, or none."""
    made = torch.Generator().manual_seed(seed)
    queries, keys = [q for q, _ in lengths], [q + more for q, more in lengths]
    given_: list[Tensor] = [
        torch.randn(sum(some), n, 8, generator=made, dtype=torch.float64)
        for some, n in ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    ]
    leaves, plain = ([x.clone().requires_grad_() for x in given_] for _ in range(2))
    at, of = ([0, *accumulate(some)] for some in (queries, keys))
    parts: list[Tensor] = []
    for s, (q, _) in enumerate(lengths):
        query = plain[0][at[s] : at[s + 1]].transpose(0, 1)
        key, value = (x[of[s] : of[s + 1]].transpose(0, 1) for x in plain[1:])
        seen = torch.ones(q, keys[s], dtype=torch.bool).tril(keys[s] - q)
        parts.append(
            scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=seen, enable_gqa=True, scale=0.3
            )[0].transpose(0, 1)
        )
    want = torch.cat(parts)
    ends = [torch.tensor(some, dtype=torch.int32) for some in (at, of)]
    got, _ = flash(leaves[0], leaves[1], leaves[2], ends[0], ends[1], max(keys), 0.3)
    torch.testing.assert_close(got, want)
    weight = torch.randn(want.shape, generator=made, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, weight), torch.autograd.grad(want, plain, weight)
    )


def test_a_rectangle_needs_no_ends() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    told, log_sum = flash(query, key, value, ends, ends, 4, 0.3)
    untold, by_sequence = flash(query, key, value, ends[:0], ends[:0], 4, 0.3)
    torch.testing.assert_close(untold, told)
    torch.testing.assert_close(by_sequence.transpose(0, 1).flatten(1), log_sum)


def test_the_operations_are_whole() -> None:
    """Shapes without data, gradients and tracing agree with what the operations do."""
    torch.manual_seed(2)
    query = torch.randn(5, 2, 8, requires_grad=True)
    key, value = (torch.randn(6, 1, 8, requires_grad=True) for _ in range(2))
    ends = (torch.tensor([0, 2, 5]).int(), torch.tensor([0, 3, 6]).int())
    torch.library.opcheck(flash, (query, key, value, *ends, 3, 0.3))
    none = ends[0][:0]
    even = [x[:4].detach().requires_grad_() for x in (query, key, value)]
    torch.library.opcheck(flash, (*even, none, none, 2, 0.3))
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    torch.library.opcheck(gated_product, (x, weight, True))
    torch.library.opcheck(gated_product, (x.detach(), weight.detach(), False))


def test_results_lie_as_graphs_were_promised() -> None:
    """Also where inputs lie head after head: compiled layers do not look before they read them."""
    torch.manual_seed(6)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    given_ = [torch.randn(n, 5, 8).transpose(0, 1).requires_grad_() for n in (4, 2, 2)]
    assert not any(x.is_contiguous() for x in given_)
    torch.library.opcheck(flash, (*given_, ends, ends, 3, 0.3))
    made = flash(given_[0], given_[1], given_[2], ends, ends, 3, 0.3)
    made += torch.autograd.grad(made[0], given_, torch.ones_like(made[0]))
    assert len(made) == 5
    assert all(x.is_contiguous() for x in made)


def test_a_gated_product_is_product_and_activation() -> None:
    torch.manual_seed(3)
    given_ = (torch.randn(7, 8), torch.randn(10, 8))
    leaves, plain = ([x.clone().requires_grad_() for x in given_] for _ in range(2))
    gate, up = linear(*plain).chunk(2, -1)
    want = silu(gate) * up
    got, pairs = gated_product(leaves[0], leaves[1], True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(pairs[:, ::2], gate)
    torch.testing.assert_close(pairs[:, 1::2], up)
    weight = torch.randn(want.shape)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, weight), torch.autograd.grad(want, plain, weight)
    )
    with torch.no_grad():
        alone, nothing = gated_product(leaves[0], leaves[1], False)
    assert not nothing.numel()
    torch.testing.assert_close(alone, want.detach())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cute)])
@pytest.mark.parametrize("kind", ["alone", "shared", "rectangle"])
def test_a_model_with_these_kernels_is_the_same_model(
    larger_model: Path, kind: str, device: str
) -> None:
    sequences = make_sequences(3, groups=1, samples=8, longest=40)
    if kind == "rectangle":
        sequences = sequences[:1] * 3
    members = tuple((i, len(s.logprobs)) for i, s in enumerate(sequences))
    prompt = sequences[0].prompt_len
    units = (
        [Unit(prompt, members)] if kind == "shared" else [Unit(prompt, (one,)) for one in members]
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found: list[tuple[Tensor, Tensor]] = []
    for takes_cute in (False, True):
        scorer = load_scorer(
            str(larger_model), temperature=1.0, chunk=64, activation_checkpointing=False,
            joint_projections=True, takes_cute=takes_cute,
        ).to(device, dtype)  # fmt: skip
        kernel = "cute" if takes_cute else None
        row = pack_row(units, sequences, torch.device(device), kernel=kernel)
        if kind == "rectangle":
            assert row.shape == "rectangular"
        else:
            assert row.shape == ("ragged" if takes_cute else "padded")
        logprob, _, _ = scorer(row)
        logprob.sum().backward()
        grads = [p.grad.flatten().float() for p in scorer.parameters() if p.grad is not None]
        with torch.no_grad():
            again, _, _ = scorer(row)
        torch.testing.assert_close(again, logprob.detach(), atol=1e-6, rtol=0)
        found.append((logprob.detach(), torch.cat(grads)))
    (a, by_a), (b, by_b) = found
    within = (1e-5, 1e-5) if device == "cpu" else (0.02, 0.05)
    assert (a - b).abs().mean().item() < within[0]
    assert ((by_a - by_b).norm() / by_a.norm()).item() < within[1]


def test_a_padded_row_stays_padded(larger_model: Path) -> None:
    """Whatever takes rows as they lie: this one does not lie as its sequences do."""
    sequences = make_sequences(3, groups=1, samples=4, longest=20)
    units = [
        Unit(sequences[0].prompt_len, tuple((i, len(s.logprobs)) for i, s in enumerate(sequences)))
    ]
    scorer = load_scorer(
        str(larger_model), temperature=1.0, chunk=64, activation_checkpointing=False
    )
    row = pack_row(units, sequences, torch.device("cpu"))
    assert row.shape == "padded"
    with torch.no_grad():
        expected, _, _ = scorer(row)
        found, _, _ = scorer(replace(row, kernel="cute"))
    torch.testing.assert_close(found, expected)


def test_rows_of_very_many_sequences_are_torchs() -> None:
    sequences = make_sequences(4, groups=1, samples=257, longest=3)
    packer = Packer(Ranks(), capacity=10_000, share_prompts=True, cost=by_tokens, kernel="cute")
    found = [
        next(iter(packer.rows(sequences, range(count))))[0].kernel
        for count in (cute.MOST_SEQUENCES, cute.MOST_SEQUENCES + 1)
    ]
    assert found == ["cute", "torch"]


def test_models_with_and_without_them_share_no_graphs(larger_model: Path) -> None:
    kinds: list[set[str]] = []
    for takes_cute in (False, True):
        scorer = load_scorer(
            str(larger_model), temperature=1.0, chunk=64, activation_checkpointing=False,
            joint_projections=True, takes_cute=takes_cute,
        )  # fmt: skip
        kinds.append({kind_of(layer) for layer in scorer.layers})
    assert len(kinds[0]) == len(kinds[1]) == 1
    assert kinds[0] != kinds[1]


def test_who_cannot_have_them_is_told_why() -> None:
    cpu = torch.device("cpu")
    heads = [cute.Heads(per_group=2, size=64)]
    assert cute.settle("auto", cpu, torch.bfloat16, heads) == (False, False)
    assert cute.settle("torch", cpu, torch.bfloat16, heads) == (False, False)
    with pytest.raises(ConfigError, match=r"flash-attn-4 and quack-kernels, but .*this is cpu"):
        cute.settle("cute", cpu, torch.bfloat16, heads)


def test_a_deterministic_trainer_is_one_when_they_are_checked(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is of other kernels then, and its products are the first ones of the process."""
    seen: list[tuple[bool, str | None]] = []

    def settle(*_: object) -> cute.Taken:
        is_set = torch.are_deterministic_algorithms_enabled()
        seen.append((is_set, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return cute.Taken(attention=False, products=False)

    monkeypatch.setattr(cute, "settle", settle)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # given back at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        TorchTrainer(TrainerSettings(deterministic=True)).load(str(model_folder))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(True, ":4096:8")]


def test_what_they_compile_is_kept_where_nobody_else_can_write(tmp_path: Path) -> None:
    """They load it again as programs."""
    nothing = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0", "QUACK_CACHE_ENABLED": "0"}
    home = tmp_path / "home"
    kept = cute.cache_variables({}, home)
    assert kept == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(home / "flash_attn"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "QUACK_CACHE_DIR": str(home / "quack"),
        "QUACK_CACHE_ENABLED": "1",
    }
    assert {stat.S_IMODE((home / part).stat().st_mode) for part in ("flash_attn", "quack")} == {
        0o700
    }
    assert kept | cute.cache_variables(kept, home) == kept
    (home / "quack").chmod(0o777)
    assert cute.cache_variables({}, home)["QUACK_CACHE_ENABLED"] == "0"
    (tmp_path / "file").touch()
    assert cute.cache_variables({}, tmp_path / "file") == nothing


def test_who_says_where_to_keep_it_is_left_at_that(tmp_path: Path) -> None:
    told = {"QUACK_CACHE_DIR": "/elsewhere", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    found = told | cute.cache_variables(told, tmp_path)
    assert found["QUACK_CACHE_DIR"] == "/elsewhere"
    assert found["QUACK_CACHE_ENABLED"] == "1"
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


def test_a_trainer_says_what_it_took(model_folder: Path) -> None:
    facts = TorchTrainer(TrainerSettings()).load(str(model_folder))
    assert facts["cute"] == []  # float32 never has them
    with pytest.raises(ConfigError, match=r"core\.attention_backend"):
        TorchTrainer(TrainerSettings(kernels="cute")).load(str(model_folder))


@needs_cute
@pytest.mark.parametrize(("per_group", "size"), [(2, 128), (4, 64), (1, 32), (7, 128)])
def test_attention_is_near_float32(per_group: int, size: int) -> None:
    errors = attention_errors(0, cute.Heads(per_group, size))
    assert len(errors) == 3
    assert max(errors.values()) < cute.ALLOWED_ERROR


@needs_cute
def test_products_are_near_float32() -> None:
    errors = product_errors(0)
    assert len(errors) == 2
    assert max(errors.values()) < cute.ALLOWED_ERROR


@needs_cute
def test_heads_that_come_out_wrong_are_torchs() -> None:
    """Whatever the check finds for odd sizes: asked for they are an error, otherwise torch's."""
    assert GPU is not None
    heads = [cute.Heads(2, 8)]
    taken = cute.settle("auto", GPU, torch.bfloat16, heads)
    assert taken.products
    if not taken.attention:
        with pytest.raises(ConfigError, match="cannot be used here"):
            cute.settle("cute", GPU, torch.bfloat16, heads)


@needs_cute
@pytest.mark.parametrize("inner", [8, 96, 1032])
@pytest.mark.parametrize("tokens", [1, 3, 130])
def test_a_gated_product_of_any_size(tokens: int, inner: int) -> None:
    torch.manual_seed(4)
    cpu = [torch.randn(tokens, 24), torch.randn(2 * inner, 24) / 5, torch.randn(tokens, inner)]
    found: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        x, weight, grad = (t.to(device, torch.bfloat16) for t in cpu)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        got, _ = gated_product(leaves[0], leaves[1], True)
        found.append([got, *torch.autograd.grad(got, leaves, grad)])
    for want, got in zip(*found, strict=True):
        away = (got.detach().cpu().float() - want.detach().float()).norm()
        assert (away / want.detach().float().norm()).item() < 0.02


@needs_cute
def test_the_output_layer_takes_rows_of_any_number() -> None:
    torch.manual_seed(5)
    hidden = torch.randn(37, 64, device="cuda").bfloat16()
    weight = torch.randn(1000, 64, device="cuda").bfloat16()
    target = torch.randint(0, 1000, (37,), device="cuda")
    found: list[Tensor] = []
    for takes_cute in (False, True):
        logprob, entropy, _ = chunked_logprobs(
            hidden, weight, target, temperature=0.7, chunk=16, with_entropy=True,
            takes_cute=takes_cute,
        )  # fmt: skip
        found.append(torch.stack([logprob, entropy]))
    assert (found[0] - found[1]).abs().mean().item() < 0.02


@needs_cute
def test_compiled_layers_hold_them(larger_model: Path) -> None:
    """Compiled and not, with and without a gradient, for rows of several kinds in turn."""
    sequences = make_sequences(6, groups=2, samples=6, longest=60)
    scores: list[list[Tensor]] = []
    for compiled in (False, True):
        told = TrainerSettings(dtype="bfloat16", kernels="cute", compile=compiled)
        one = TorchTrainer(told)
        assert one.load(str(larger_model))["cute"] == ["attention", "products"]
        found: list[Tensor] = []
        for some in (sequences, sequences[:3], sequences[:1] * 4, sequences[:1] * 2, sequences[2:]):
            found += [torch.from_numpy(p) for p in one.score(tuple(some), temperature=1.0)]
        scores.append(found)
        one.stop()
    gaps = torch.cat([(a - b).abs() for a, b in zip(*scores, strict=True)])
    assert gaps.mean().item() < 0.02
