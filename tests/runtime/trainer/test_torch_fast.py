"""What makes a step fast must not change it: each fast form against its plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from runtime.trainer.packing import Unit
from runtime.trainer.settings import OptimizerSettings
from runtime.trainer.torch import gate, rotary
from runtime.trainer.torch.adamw import LongAdamW
from runtime.trainer.torch.head import chunked_logprobs
from runtime.trainer.torch.layout import choose_shape, pack_row
from runtime.trainer.torch.long import LongWeights
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.scorer import load_scorer
from runtime.trainer.torch.weights import Weights
from tests.runtime.trainer.tiny import make_sequences

no_deadline = settings(deadline=None, max_examples=25)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels")


@no_deadline
@given(
    rows=st.integers(1, 12),
    kept=st.integers(0, 14),
    chunk=st.integers(1, 7),
    temperature=st.sampled_from([1.0, 0.7]),
    with_entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kept_and_remade_logits_give_autograds_gradient(
    rows: int, kept: int, chunk: int, temperature: float, with_entropy: bool, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 5, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=made, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 11, (rows,), generator=made)
    by_logprob, by_entropy = torch.randn(2, rows, generator=made)
    logprobs = (hidden @ weight.t() / temperature).log_softmax(-1)
    plain = logprobs.gather(1, target[:, None]).squeeze(1) * by_logprob
    if with_entropy:
        plain = plain - (logprobs.exp() * logprobs).sum(-1) * by_entropy
    wanted = torch.autograd.grad(plain.sum(), (hidden, weight))
    leaves = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    logprob, entropy, _ = chunked_logprobs(
        leaves[0], leaves[1], target, temperature=temperature, chunk=chunk,
        with_entropy=with_entropy, kept_bytes=kept * 11 * 4,
    )  # fmt: skip
    loss = (logprob * by_logprob).sum() + (entropy * by_entropy).sum() * with_entropy
    for got, want in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_a_long_step_is_torchs_step() -> None:
    torch.manual_seed(0)
    shapes = [(7, 9), (3,), (64, 2)]
    theirs = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    told = OptimizerSettings(lr=1e-2, weight_decay=0.1, beta2=0.99)
    adam = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    long = LongWeights(ours, torch.bfloat16)
    step = LongAdamW(long, told, names=["a", "b", "c"])
    for _ in range(4):
        before = [p.detach().clone() for p in theirs]
        for a, b in zip(theirs, ours, strict=True):
            gradient = torch.randn(a.shape).bfloat16()
            a.grad = gradient.float() * 2 * 0.3
            for _ in range(2):  # two rows: gradients add up in fp32
                (b * gradient).sum().backward()
        adam.step()
        whole = long.gradient()
        assert whole is not None
        length = whole.norm().reshape(1)
        step.step(1e-2, length, 0.3 * (length.item() + 1e-6))  # clipped to 0.3 of it
        long.drop_gradient()
        for master in long.masters:
            master.grad = None
        pairs = zip(theirs, before, strict=True)
        moved = sum((a.detach() - b).square().sum().item() for a, b in pairs)
        assert step.squared_change() == pytest.approx(moved, rel=1e-4)
        for a, master, b in zip(theirs, long.masters, ours, strict=True):
            torch.testing.assert_close(a.detach(), master.detach(), atol=1e-6, rtol=1e-5)
            assert torch.equal(b, master.to(torch.bfloat16))
    assert step.num_steps == 4


def test_a_weight_without_gradient_counts_as_zero() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    long = LongWeights(params, torch.bfloat16)
    assert long.gradient() is None
    (params[1] * 2).sum().backward()
    whole = long.gradient()
    assert whole is not None
    assert whole.sum().item() == 10
    assert torch.isfinite(whole).all()


def test_joint_projections_give_the_same_model(model_folder: Path) -> None:
    sequences = make_sequences(5)
    bins = [Unit(s.prompt_len, ((i, len(s.logprobs)),)) for i, s in enumerate(sequences)]
    row = pack_row(bins, sequences, torch.device("cpu"))
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for joint in (False, True):
        scorer = load_scorer(
            str(model_folder), temperature=1.0, chunk=64, activation_checkpointing=False,
            joint_projections=joint,
        )  # fmt: skip
        logprob, _, _ = scorer(row)
        logprob.sum().backward()
        assert isinstance(scorer.causal_lm, Qwen3ForCausalLM)
        grads = {n: p.grad for n, p in scorer.hf_names() if p.grad is not None}
        found.append((logprob.detach(), grads))
    (plain, plain_grads), (fast, fast_grads) = found
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert list(plain_grads) == list(fast_grads)
    for name, gradient in plain_grads.items():
        torch.testing.assert_close(fast_grads[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_trained", [True, False])
def test_scoring_without_copies_follows_the_weights(model_folder: Path, is_trained: bool) -> None:
    """Joint weights read where they lie: the very same log-probs, also later."""
    sequences, ranks = make_sequences(5), Ranks()
    bins = [Unit(s.prompt_len, ((i, len(s.logprobs)),)) for i, s in enumerate(sequences)]
    row = pack_row(bins, sequences, ranks.device)
    # A GPU may choose another kernel for weights that lie elsewhere: then equal but for rounding.
    allowed = 0.0 if ranks.device.type == "cpu" else 0.02
    scorer = load_scorer(
        str(model_folder), temperature=1.0, chunk=64, activation_checkpointing=False,
        joint_projections=True,
    )  # fmt: skip
    masters: list[nn.Parameter] = []
    if is_trained:
        masters = Weights(scorer, ranks, torch.bfloat16).masters
    else:
        Weights.frozen(scorer, ranks, torch.bfloat16)
    joint = [m for m in scorer.modules() if getattr(m, "joint_weight", None) is not None]
    assert len(joint) == 4  # attention and MLP of two layers
    seen: list[Tensor] = []
    for _ in range(3):
        wanted, _, _ = scorer(row)  # with a gradient: concatenated
        with torch.no_grad():
            got, _, _ = scorer(row)
            torch.testing.assert_close(got, wanted.detach(), atol=allowed, rtol=allowed)
            seen.append(got)
            for param in masters or scorer.parameters():
                param.mul_(1.5)
            if is_trained:
                for param, master in zip(scorer.parameters(), masters, strict=True):
                    param.copy_(master)
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_return_memory_of_their_own(dtype: torch.dtype) -> None:
    """Torch refuses a result that lies in another one, or in an argument."""
    every_operator_on("cpu", dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_of_triton_return_memory_of_their_own(dtype: torch.dtype) -> None:
    for plain, fast in zip(
        every_operator_on("cpu", dtype), every_operator_on("cuda", dtype), strict=True
    ):
        torch.testing.assert_close(fast.cpu(), plain, atol=2e-2, rtol=2e-2)


def every_operator_on(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Results of every operator of this package that runs on one device, checked."""
    made = torch.Generator().manual_seed(4)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(device, dtype)

    joint, cos, sin = some(5, (4 + 4) * 8), some(5, 8), some(5, 8)
    grads = [some(5, heads, 8) for heads in (4, 2, 2)]
    gated_joint, gated_grad = some(4, 12), some(4, 6)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (gate.gated, (gated_joint,)),
        (gate._gated_backward, (gated_grad, gated_joint)),
    ]
    for norms in ([None, None], [some(8), some(8)]):
        calls += [
            (rotary.rotate_qkv, (joint, *norms, cos, sin, 4, 1e-6)),
            (rotary._rotate_qkv_backward, (*grads, joint, *norms, cos, sin, 1e-6)),
        ]
    found: list[Tensor] = []
    for operator, told in calls:
        torch.library.opcheck(operator, told, test_utils=("test_schema", "test_faketensor"))
        results = operator(*told)
        results = [results] if isinstance(results, Tensor) else list(results)
        own = [x.untyped_storage().data_ptr() for x in results if x.numel()]
        given = [x.untyped_storage().data_ptr() for x in told if isinstance(x, Tensor)]
        assert len({*own}) == len(own), operator
        assert not {*own} & {*given}, operator
        found += results
    return found


@pytest.mark.parametrize("with_norm", [True, False])
def test_rotation_has_autograds_gradient(with_norm: bool) -> None:
    torch.manual_seed(1)
    joint = torch.randn(5, (3 + 4) * 8, requires_grad=True)
    norms = [torch.randn(8, requires_grad=True) for _ in range(2)] if with_norm else [None, None]
    cos, sin = torch.randn(2, 5, 8)
    leaves = [x for x in (joint, *norms) if x is not None]
    weights = [torch.randn(5, heads, 8) for heads in (3, 2, 2)]

    def gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, leaves)

    wanted = gradients(rotary._plain(joint, *norms, cos, sin, 3, 1e-6))
    got = gradients(rotary.rotate_qkv(joint, *norms, cos, sin, 3, 1e-6))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gate_has_autograds_gradient() -> None:
    torch.manual_seed(1)
    joint, weight = torch.randn(4, 12, requires_grad=True), torch.randn(4, 6)
    left, right = joint.chunk(2, -1)
    (wanted,) = torch.autograd.grad((nn.functional.silu(left) * right * weight).sum(), joint)
    (got,) = torch.autograd.grad((gate.gated(joint) * weight).sum(), joint)
    torch.testing.assert_close(got, wanted)


@no_deadline
@given(seed=st.integers(0, 200), share=st.booleans())
def test_ragged_rows_name_the_keys_each_query_sees(seed: int, share: bool) -> None:
    """The same (query, key) pairs as in padded form, which others hold against transformers."""
    sequences = make_sequences(seed, groups=2, samples=3, longest=30)
    units = [Unit(sequences[i].prompt_len, ((i, len(sequences[i].logprobs)),)) for i in range(6)]
    if share:
        units = [
            Unit(s.prompt_len, tuple((i, len(sequences[i].logprobs)) for i in (g, g + 1, g + 2)))
            for g, s in ((0, sequences[0]), (3, sequences[3]))
        ]
    device = torch.device("cpu")
    row = pack_row(units, sequences, device, kernel="torch")
    padded = pack_row(units, sequences, device)
    if row.shape != "ragged":
        return
    keys = row.key_K if row.key_K.numel() else torch.arange(len(row.token_T))
    for s in range(row.num_sequences):
        q0, q1 = row.query_ends_S1[s : s + 2].tolist()
        k0, k1 = row.key_ends_S1[s : s + 2].tolist()
        assert padded.row_SL[s, : k1 - k0].tolist() == keys[k0:k1].tolist()
        # Queries are the last ones of their sequence.
        assert keys[k1 - (q1 - q0) : k1].tolist() == list(range(q0, q1))
    assert row.query_ends_S1[-1] == len(row.token_T)


def test_shapes_are_chosen_by_cost() -> None:
    equal, tail = np.full(4, 100), np.array([1000, 10, 10, 10])
    assert choose_shape(equal, equal, kernel="torch") == "rectangular"
    assert choose_shape(tail, tail, kernel="torch") == "ragged"
    assert choose_shape(tail, tail, kernel=None) == "padded"
    near = np.array([100, 99, 98, 97])
    assert choose_shape(near, near, kernel="torch") == "padded"
    assert choose_shape(near, near, kernel="cute") == "ragged"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_plain_forms(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    cpu = [torch.randn(33, 5003).to(dtype), torch.randint(0, 5003, (33,)), *torch.randn(2, 33)]
    from runtime.trainer.torch import head

    def run(device: str) -> list[Tensor]:
        z, y, a, b = (x.clone().to(device) for x in cpu)
        logprob, normaliser, entropy = head._row_stats(z, y, 0.7, True)
        made = head._row_gradient(z, y, normaliser, entropy, a, b, 0.7)
        return [x.cpu() for x in (logprob, normaliser, entropy, made)]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        within = 2e-5 if got.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, want, atol=within, rtol=within)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0.5, 3.0, float("inf"), float("nan")])
def test_the_adamw_kernel_is_its_plain_form(length: float, dtype: torch.dtype) -> None:
    from runtime.trainer.torch import kernels
    from runtime.trainer.torch.adamw import adamw_

    torch.manual_seed(3)
    cpu = [torch.randn(5003) for _ in range(5)]
    cpu[3].abs_()

    def run(device: str, step: Callable[..., Tensor]) -> list[Tensor]:
        state = [x.clone().to(device) for x in cpu]
        state[0] = state[0].to(dtype)
        change = step(
            *state, torch.tensor([length], device=device), max_norm=1.0, decay=0.99, step_size=0.1,
            root_correction=1.2, betas=(0.9, 0.99), eps=1e-8,
        )  # fmt: skip
        return [x.float().cpu() for x in (*state, change.sum())]

    for got, want in zip(run("cuda", kernels.adamw_), run("cpu", adamw_), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize("share", [True, False])
def test_ragged_attention_is_padded_attention(model_folder: Path, share: bool) -> None:
    lengths = (70, 9, 8, 9, 7, 8)
    sequences = tuple(
        s
        for at, n in enumerate(lengths)
        for s in make_sequences(at, groups=1, samples=1, longest=n)
    )
    if share:
        sequences = make_sequences(3, groups=1, samples=8, longest=70)
        members = tuple((i, len(s.logprobs)) for i, s in enumerate(sequences))
        units = [Unit(sequences[0].prompt_len, members)]
    else:
        units = [Unit(s.prompt_len, ((i, len(s.logprobs)),)) for i, s in enumerate(sequences)]
    scorer = load_scorer(
        str(model_folder), temperature=1.0, chunk=64, activation_checkpointing=False,
        joint_projections=True,
    ).to("cuda", torch.bfloat16)  # fmt: skip
    found: list[tuple[Tensor, Tensor]] = []
    for kernel in (None, "torch"):
        row = pack_row(units, sequences, torch.device("cuda"), kernel=kernel)
        assert row.shape == ("ragged" if kernel else "padded")
        logprob, _, _ = scorer(row)
        logprob.sum().backward()
        grads = [p.grad.flatten().float() for p in scorer.parameters() if p.grad is not None]
        found.append((logprob.detach(), torch.cat(grads)))
        scorer.zero_grad()
    (a, by_a), (b, by_b) = found
    assert (a - b).abs().mean().item() < 0.02
    assert ((by_a - by_b).norm() / by_a.norm()).item() < 0.02
