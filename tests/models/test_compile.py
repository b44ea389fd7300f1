"""Each part compiles; where the whole part can be one graph, fullgraph=True proves that it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evenload.balancers import Router
from evenload.models import Attention, Experts, MoELayer, chunked_cross_entropy, sequence_context


def assert_compiled_is_eager(function: Callable[..., Tensor], module: nn.Module, *inputs: Tensor, fullgraph: bool) -> None:
    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=fullgraph)):
        module.zero_grad()
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = call(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves if x.requires_grad), *(p.grad for p in module.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moe_layer(dtype: torch.dtype) -> None:
    layer = MoELayer(Router(16, 4, 2), Experts(4, 16, 24, init_std=0.2)).to(dtype)
    assert_compiled_is_eager(layer, layer, torch.randn(9, 16, dtype=dtype), fullgraph=dtype == torch.bfloat16)


def test_attention_of_packed_documents() -> None:
    attention = Attention(16, 4, 2, 4, init_std=0.2)

    def attend(x: Tensor, ids: Tensor) -> Tensor:
        return attention(x, sequence_context(x, 4, 100.0, document_ids=ids))

    assert_compiled_is_eager(attend, attention, torch.randn(1, 6, 16), torch.tensor([[0, 0, 0, 1, 1, 1]]), fullgraph=True)


def test_chunked_cross_entropy() -> None:
    head = nn.Linear(8, 20, bias=False)

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, head.weight, targets, z_loss=0.1, chunk=4)[0]

    assert_compiled_is_eager(loss, head, torch.randn(6, 8), torch.randint(0, 20, (6,)), fullgraph=True)
