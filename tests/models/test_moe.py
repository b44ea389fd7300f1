from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenload.balancers import Router
from evenload.models import DenseFFN, Experts, MoELayer

D, E, K = 8, 4, 2


class Choice(NamedTuple):
    indices: Tensor
    weights: Tensor


class ForeignRouter(nn.Module):
    """Somebody's own router: takes x alone, knows no padding, returns a plain tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x: Tensor) -> Choice:
        probabilities = self.gate(x).softmax(-1)
        weights, indices = probabilities.topk(K)
        return Choice(indices, weights)


class FixedRouter(nn.Module):
    """Sends everything where it is told."""

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.indices = indices

    def forward(self, x: Tensor, **_: Tensor) -> Choice:
        return Choice(self.indices, torch.full(self.indices.shape, 0.5))


def by_hand(layer: MoELayer, x_TD: Tensor, choice: Choice) -> Tensor:
    out = torch.zeros_like(x_TD)
    for token in range(x_TD.shape[0]):
        for expert, weight in zip(choice.indices[token].tolist(), choice.weights[token], strict=True):
            counts = torch.zeros(E, dtype=torch.int64)
            counts[expert] = 1
            out[token] += weight * layer.experts(x_TD[token : token + 1], counts)[0]
    return out


def test_takes_any_router() -> None:
    layer = MoELayer(ForeignRouter(), Experts(E, D, 12, init_std=0.5))
    x = torch.randn(2, 5, D)
    choice = layer.router(x)
    expected = by_hand(layer, x.view(-1, D), Choice(choice.indices.view(-1, K), choice.weights.view(-1, K)))
    torch.testing.assert_close(layer(x), expected.view_as(x))
    layer(x).sum().backward()
    assert layer.router.gate.weight.grad.any()


def test_shared_expert_serves_every_real_token() -> None:
    shared = DenseFFN(D, 6, init_std=0.5)
    layer = MoELayer(Router(D, E, K), Experts(E, D, 12, init_std=0.5), shared)
    without = MoELayer(layer.router, layer.experts)
    x = torch.randn(2, 5, D)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    torch.testing.assert_close(layer(x), without(x) + shared(x))
    assert not layer(x, mask=mask)[~mask].any()
    torch.testing.assert_close(layer(x, mask=mask)[mask], layer(x)[mask])


def test_numbering_of_experts_does_not_matter() -> None:
    layer = MoELayer(Router(D, E, K), Experts(E, D, 12, init_std=0.5))
    x = torch.randn(2, 5, D)
    before = layer(x)
    before.square().sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter[order])
    layer.zero_grad()
    after = layer(x)
    torch.testing.assert_close(after, before)
    after.square().sum().backward()
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad[order])


def test_capacity_drops_are_counted_in_training_only_and_once_under_recomputation() -> None:
    # Eight tokens all want experts 0 and 1, which take ceil(1.0 * 8 * 2 / 4) = 4 each.
    layer = MoELayer(FixedRouter(torch.tensor([[0, 1]] * 8)), Experts(E, D, 12), capacity_factor=1.0)
    x = torch.randn(8, D, requires_grad=True)
    out = layer(x)
    assert (out[:4] != 0).all()
    assert not out[4:].any()
    assert layer.pop_dropped().item() == 8
    assert layer.pop_dropped().item() == 0
    for reentrant in (False, True):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert layer.pop_dropped().item() == 8
    layer.eval()
    layer(x)
    assert layer.pop_dropped().item() == 0
    assert layer.to(torch.bfloat16).dropped.dtype == torch.int64


def test_generous_capacity_is_dropless() -> None:
    router, experts = Router(D, E, K), Experts(E, D, 12, init_std=0.5)
    x = torch.randn(9, D)
    dropping = MoELayer(router, experts, capacity_factor=1000.0)
    assert torch.equal(dropping(x), MoELayer(router, experts)(x))
    assert dropping.pop_dropped().item() == 0


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("all_padding", [False, True])
def test_a_rank_without_tokens_keeps_its_graph(capacity_factor: float | None, all_padding: bool) -> None:
    layer = MoELayer(Router(D, E, K, balancers="eqb+lei"), Experts(E, D, 12), DenseFFN(D, 6), capacity_factor)
    x = torch.randn(3 if all_padding else 0, D, requires_grad=True)
    out = layer(x, mask=torch.zeros(len(x), dtype=torch.bool))
    assert not out.any()
    out.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_misfits_are_refused() -> None:
    x = torch.randn(3, D)
    layer = MoELayer(FixedRouter(torch.tensor([[0, 1]] * 4)), Experts(E, D, 12))
    with pytest.raises(ValueError, match="4 rows for 3 tokens"):
        layer(x)
    with pytest.raises(ValueError, match="give bool of shape"):
        layer(x, mask=torch.ones(3))
    with pytest.raises(ValueError, match="give bool of shape"):
        layer(x, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="capacity_factor=0"):
        MoELayer(layer.router, layer.experts, capacity_factor=0)


def test_eval_drops_nothing() -> None:
    """A row's output must not depend on who shares its batch."""
    layer = MoELayer(Router(D, E, K), Experts(E, D, 12), capacity_factor=0.5).eval()
    x = torch.randn(4, 8, D)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))
    assert layer.pop_dropped() == 0
    assert not torch.allclose(layer.train()(x)[:1], layer(x[:1]))
