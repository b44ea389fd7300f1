"""Rows 13, 14: the MoE layer around a router.

Shape suffixes: T tokens, E experts, D width (= E).
"""

import math

import torch
from torch import nn

from .adapter import Adapter, set_identity
from .subject import Failed, Subject, batch, certain


def empty_expert(subject: Subject) -> str:
    """Row 13. One token goes to experts 0 and 1; the gradients of the others must be zero."""
    experts = 8
    layer = _layer(subject.adapter, experts)
    x = certain(torch.tensor([[0, 1]]), experts, height=3.0).requires_grad_()
    layer(x).square().sum().backward()
    names = []
    for name, parameter in subject.adapter.expert_parameters(layer).items():
        if parameter.grad is None:
            continue
        idle = parameter.grad[2:]
        if not (idle == 0).all():
            kind = "NaN" if idle.isnan().any() else "not zero"
            raise Failed(f"the gradient of {name} is {kind} for experts without tokens")
        names.append(name)
    if not names:
        raise Failed("no expert parameter gets a gradient, although tokens were routed")
    return f"exactly zero: {', '.join(names)}"


def capacity(subject: Subject) -> str:
    """Row 14."""
    layer = _layer(subject.adapter, 8, capacity_factor=1000.0)
    dropless = _layer(subject.adapter, 8)
    dropless.load_state_dict(layer.state_dict())
    x = batch(24)
    try:
        generous = layer(x)
    except Exception as error:
        raise Failed(f"a capacity above the number of tokens ends in {type(error).__name__}: {error}") from error
    if not torch.equal(generous, dropless(x)):
        raise Failed("a capacity above the number of tokens changes the output")
    for wrong in (0.0, -1.0, math.nan, "one"):
        try:
            subject.adapter.layer(8, 2, capacity_factor=wrong)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            continue
        raise Failed(f"capacity_factor={wrong!r} is accepted")
    tight = _layer(subject.adapter, 8, capacity_factor=1.0)
    tokens = certain(torch.tensor([[0, 1]]).expand(24, 2), 8)
    served = int((tight(tokens).detach().abs().sum(dim=1) > 0).sum())
    if subject.adapter.selects_by_score and served > math.ceil(24 * 2 / 8):
        raise Failed(f"capacity_factor=1 lets an expert take {served} of 24 tokens; its share is {math.ceil(24 * 2 / 8)}")
    return "clamped to the tokens; 0, negative and misspelt values are errors"


def _layer(adapter: Adapter, experts: int, capacity_factor: float | None = None) -> nn.Module:
    torch.manual_seed(4)
    layer = adapter.layer(experts, 2, capacity_factor=capacity_factor)
    set_identity(adapter.layer_gate(layer), experts)
    return layer.train()
