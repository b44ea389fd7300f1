"""Permutation kernels equal their definitions: places to the bit, sums within rounding; there and back is the identity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.kernels import ops, permutation
from evenload.models import Experts, MoELayer
from evenload.models.dispatch import LocalDispatcher


def choices(tokens, experts, k):
    return torch.rand(tokens, experts).argsort(dim=1)[:, :k]


@settings(max_examples=15)
@given(st.integers(0, 200), st.sampled_from([1, 2, 3, 7, 16, 97]), st.integers(1, 5), st.booleans())
def test_order(tokens, experts, k, masked):
    indices = choices(tokens, experts, min(k, experts))
    mask = torch.rand(tokens) > 0.4 if masked else None
    slots, starts = ops.expert_order(indices, experts, mask)
    expected_slots, expected_starts = permutation.expert_order(indices, experts, mask)
    assert torch.equal(slots, expected_slots)
    assert torch.equal(starts, expected_starts)


def test_order_where_one_expert_has_everything():
    indices = torch.full((600, 1), 4)
    assert torch.equal(ops.expert_order(indices, 9, None)[0], torch.arange(600))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (1, 1, 1, 1), (13, 5, 3, 7), (6, 4, 4, 1500)], ids=str)
def test_rows_and_their_gradients(dtype, shape):
    tokens, experts, k, width = shape
    slots, _ = permutation.expert_order(choices(tokens, experts, k), experts)
    slots = slots[torch.arange(len(slots)) % 5 != 3]  # some assignments were dropped
    grads = []
    x, weights = torch.randn(tokens, width).to(dtype), torch.rand(tokens, k)
    upstream = torch.randn(tokens, width).to(dtype)
    for take, back in (
        (ops.take_tokens, lambda r, w, s: ops.sum_slots(r, s, w, *w.shape)),
        (permutation.permute, permutation.unpermute),
    ):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows = take(leaves[0], slots, k)
        out = back(rows * 0.5, leaves[1], slots)
        out.backward(upstream)
        grads.append((rows.detach(), out.detach(), leaves[0].grad, leaves[1].grad))
    for name, found, expected in zip(("rows", "out", "grad of x", "grad of weights"), *grads, strict=True):
        assert found.dtype == expected.dtype, name
        if name == "rows":
            assert torch.equal(found, expected)
        close = {} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **close, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=8)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 20))
def test_there_and_back_is_the_identity(tokens, experts, width):
    k = min(3, experts)
    slots, _ = ops.expert_order(choices(tokens, experts, k), experts, None)
    assert torch.equal(slots.sort().values, torch.arange(tokens * k))
    x = torch.randn(tokens, width)
    one_expert_each = torch.eye(k)[torch.randint(k, (tokens,))]
    assert torch.equal(ops.sum_slots(ops.take_tokens(x, slots, k), slots, one_expert_each, tokens, k), x)


def test_operators_hold_to_the_rules_of_torch():
    indices = choices(6, 4, 2)
    slots, _ = ops.expert_order(indices, 4, None)
    torch.library.opcheck(ops.expert_order, (indices, 4, torch.rand(6) > 0.5))
    torch.library.opcheck(ops.take_tokens, (torch.randn(6, 5, requires_grad=True), slots, 2))
    rows = torch.randn(12, 5, requires_grad=True)
    torch.library.opcheck(ops.sum_slots, (rows, slots, torch.rand(6, 2, requires_grad=True), 6, 2))
    torch.library.opcheck(ops.sum_slots, (rows, slots, None, 6, 2))


@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_is_the_layer_of_the_definition(capacity, masked, monkeypatch):
    from evenload import Router

    layer = MoELayer(Router(16, 4, 2), Experts(4, 16, 24, init_std=0.2), capacity_factor=capacity)
    x, mask = torch.randn(30, 16), torch.arange(30) % 4 > 0
    results = []
    for wanted in (True, False):
        monkeypatch.setattr("evenload.kernels.uses_triton", lambda *_, wanted=wanted: wanted)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(leaf, mask=mask if masked else None)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, layer.pop_dropped(), *(p.grad for p in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_of_an_expert_keep_their_order():
    rows, counts, plan = LocalDispatcher(3).dispatch(torch.arange(4.0)[:, None], torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]]))
    assert counts.tolist() == [3, 2, 3]
    assert rows[:, 0].tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert plan.slots.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]
