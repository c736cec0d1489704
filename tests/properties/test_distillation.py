"""On-policy distillation against its formulas in float64, over a whole vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.trainer import losses
from runtime.trainer.torch.head import chunked_logprobs, likeliest

no_deadline = settings(deadline=None, max_examples=40)

VOCAB = 9


def distributions(seed: int, rows: int, sharpness: float) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=made, dtype=torch.float64) * sharpness
    return logits.log_softmax(-1)


def full_kl(student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    return (student_TV.exp() * (student_TV - teacher_TV)).sum(1)


@no_deadline
@given(
    st.integers(0, 999), st.integers(1, VOCAB - 1), st.integers(1, 5), st.sampled_from([0.5, 3.0])
)
def test_buckets_bound_the_kl_from_below(seed: int, k: int, rows: int, sharpness: float) -> None:
    student, teacher = distributions(seed, rows, sharpness), distributions(seed + 1, rows, 1.0)
    top, ids = teacher.topk(k, -1)
    active = torch.ones(rows, dtype=torch.bool)
    found = losses.bucketed_reverse_kl(student.gather(1, ids), top, active)
    p, t = student.gather(1, ids).exp().sum(1), top.exp().sum(1)
    for row in range(rows):
        want = sum(
            math.exp(student[row, i]) * (student[row, i].item() - teacher[row, i].item())
            for i in ids[row].tolist()
        )
        want += (1 - p[row].item()) * (math.log(1 - p[row].item()) - math.log(1 - t[row].item()))
        assert found[row].item() == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert (found >= -1e-9).all()
    assert (found <= full_kl(student, teacher) + 1e-6).all()
    if k == VOCAB - 1:  # every bucket holds one token
        torch.testing.assert_close(found, full_kl(student, teacher), atol=1e-6, rtol=1e-6)
    assert losses.bucketed_reverse_kl(top, top, active).abs().max() < 1e-9


@no_deadline
@given(st.integers(0, 999), st.floats(0.01, 3.0), st.lists(st.booleans(), min_size=1, max_size=6))
def test_the_teacher_moves_an_advantage_by_the_gap(
    seed: int, coef: float, active: list[bool]
) -> None:
    made = torch.Generator().manual_seed(seed)
    advantage, student, teacher = torch.randn(3, len(active), generator=made, dtype=torch.float64)
    teacher[~torch.tensor(active)] = math.nan  # what a masked token holds is nobody's concern
    found = losses.distilled_advantage(
        advantage, coef=coef, student_T=student, teacher_T=teacher, active_T=torch.tensor(active)
    )
    for i, counts in enumerate(active):
        gap = (student[i] - teacher[i]).item() if counts else 0.0
        assert found[i].item() == pytest.approx(advantage[i].item() - coef * gap)


def test_masked_tokens_have_no_kl_and_no_gradient() -> None:
    student = torch.tensor([[-1.0, -2.0], [math.nan, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-1.5, -1.5], [-1.0, math.nan]])
    kl = losses.bucketed_reverse_kl(student, teacher, torch.tensor([True, False]))
    assert kl[1] == 0
    kl.sum().backward()
    assert student.grad is not None
    assert student.grad[0].abs().sum() > 0
    assert (student.grad[1] == 0).all()


@no_deadline
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 9),
    k=st.integers(1, 4),
    kept=st.integers(0, 10),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_log_probs_of_further_tokens_have_autograds_gradient(
    seed: int, rows: int, k: int, kept: int, temperature: float
) -> None:
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 5, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 5, generator=made, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, VOCAB, (rows,), generator=made)
    also = torch.stack([torch.randperm(VOCAB, generator=made)[:k] for _ in range(rows)])
    by_target = torch.randn(rows, generator=made)
    by_also = torch.randn(rows, k, generator=made)
    plain = (hidden @ weight.t() / temperature).log_softmax(-1)
    total = (plain.gather(1, target[:, None]).squeeze(1) * by_target).sum()
    wanted = torch.autograd.grad(total + (plain.gather(1, also) * by_also).sum(), (hidden, weight))
    leaves = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    logprob, _, picked = chunked_logprobs(
        leaves[0], leaves[1], target, temperature=temperature, chunk=2, with_entropy=False,
        also_RK=also, kept_bytes=kept * VOCAB * 4,
    )  # fmt: skip
    torch.testing.assert_close(
        picked.double(), plain.detach().gather(1, also), atol=2e-5, rtol=2e-5
    )
    loss = (logprob * by_target).sum() + (picked * by_also).sum()
    for got, want in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    top, ids = likeliest(leaves[0], leaves[1], k, temperature=temperature, chunk=2)
    torch.testing.assert_close(
        top.double(), plain.detach().topk(k, -1).values, atol=2e-5, rtol=1e-4
    )
    torch.testing.assert_close(top.double(), plain.detach().gather(1, ids), atol=2e-5, rtol=1e-4)
