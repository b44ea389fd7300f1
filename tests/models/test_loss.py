import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenload.models import chunked_cross_entropy

T, V, D = 11, 13, 6


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(0, V, (T,))
    targets[[2, 7]] = -100
    hidden = torch.randn(T, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden, weight, targets


def all_at_once(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    logits = hidden @ weight.T
    z = logits.logsumexp(-1).square()[targets != -100].sum()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") + z_loss * z


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_value_and_gradient_are_those_of_all_logits_at_once(chunk: int, z_loss: float) -> None:
    hidden, weight, targets = problem()
    loss_sum, nll_sum, num_targets = chunked_cross_entropy(hidden, weight, targets, z_loss=z_loss, chunk=chunk)
    expected = all_at_once(hidden, weight, targets, z_loss)
    torch.testing.assert_close(loss_sum, expected)
    torch.testing.assert_close(nll_sum, all_at_once(hidden, weight, targets, 0.0).detach())
    assert not nll_sum.requires_grad
    assert int(num_targets) == T - 2
    got = torch.autograd.grad(loss_sum * 3, (hidden, weight))
    for a, b in zip(got, torch.autograd.grad(expected * 3, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b)
    assert not got[0][[2, 7]].any()


def test_finite_differences() -> None:
    hidden, weight, targets = problem()
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, z_loss=0.3, chunk=4)[0], (hidden, weight))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_and_no_grad(frozen: int) -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_(frozen == 1)
    weight.requires_grad_(frozen == 0)
    with torch.set_grad_enabled(frozen != 2):
        loss_sum, _, _ = chunked_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss_sum.detach(), all_at_once(hidden, weight, targets, 0.0).detach())
    assert loss_sum.requires_grad == (frozen != 2)
    if frozen != 2:
        loss_sum.backward()
        assert (hidden.grad is None) == (frozen == 0)
        assert (weight.grad is None) == (frozen == 1)


@pytest.mark.parametrize("size", [0, T])
def test_without_targets_everything_is_zero(size: int) -> None:
    hidden, weight, _ = problem()
    loss_sum, nll_sum, num_targets = chunked_cross_entropy(hidden[:size], weight, torch.full((size,), -100), z_loss=1.0)
    loss_sum.backward()
    assert loss_sum.item() == nll_sum.item() == num_targets.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem(torch.float32)
    loss_sum, _, _ = chunked_cross_entropy(hidden * 1e4, weight, targets)
    torch.testing.assert_close(loss_sum, all_at_once(hidden * 1e4, weight, targets, 0.0))


def test_bfloat16_sums_in_float32() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    loss_sum, _, _ = chunked_cross_entropy(hidden, weight, targets, z_loss=0.1, chunk=3)
    logits = (hidden @ weight.T).float()
    z = logits.logsumexp(-1).square()[targets != -100].sum()
    torch.testing.assert_close(loss_sum, F.cross_entropy(logits, targets, reduction="sum") + 0.1 * z)
    loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_autocast() -> None:
    hidden, weight, targets = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss_sum, _, _ = chunked_cross_entropy(hidden, weight, targets)
    loss_sum.backward()
    expected = torch.autograd.grad(all_at_once(hidden, weight, targets, 0.0), (hidden, weight))
    torch.testing.assert_close(hidden.grad, expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad, expected[1], rtol=0.05, atol=0.05)


def test_refuses_misfits() -> None:
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match=r"targets have shape \(10,\)"):
        chunked_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(hidden, weight, targets, chunk=0)
