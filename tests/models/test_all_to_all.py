"""Rows that travel: the layer over ranks computes what it computes with all tokens in one process."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch import distributed as dist

from evenload.models import AllToAllDispatcher, Experts, LocalDispatcher
from evenload.models.all_to_all import expert_major

E, K, D = 8, 2, 4
SIZES = {"even": (6, 6, 6, 6), "uneven": (1, 9, 4, 2), "one rank has none": (5, 0, 7, 3), "nobody has any": (0, 0, 0, 0)}


def tokens(rank: int, sizes: tuple[int, ...], crowded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's x, expert ids, weights and mask. Crowded: all tokens want experts 0 and 5, so most ranks get no row."""
    generator = torch.Generator().manual_seed(10 + rank)
    size = sizes[rank]
    x = torch.randn(size, D, generator=generator)
    indices = torch.rand(size, E, generator=generator).argsort(dim=1)[:, :K]
    if crowded:
        indices = torch.tensor([0, 5]).expand(size, K)
    return x, indices, torch.rand(size, K, generator=generator), torch.arange(size) % 5 != 3


def experts(first: int, count: int) -> Experts:
    torch.manual_seed(0)
    whole = Experts(E, D, 4, compute="loop", init_std=0.5)
    part = Experts(count, D, 4, compute="loop")
    with torch.no_grad():
        for name, weight in part.named_parameters():
            weight.copy_(whole.get_parameter(name)[first : first + count])
    return part


def forward_backward(
    dispatcher: Any, layer: Experts, x: Tensor, indices: Tensor, weights: Tensor, mask: Tensor
) -> list[Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows, counts, plan = dispatcher.dispatch(x, indices, mask)
    out = dispatcher.combine(layer(dispatcher.receive(rows, plan), counts), weights, plan)
    (out * torch.arange(1.0, D + 1)).sum().backward()
    return [out.detach(), x.grad, weights.grad, plan.dropped, *(weight.grad for weight in layer.parameters())]


def over_ranks(
    rank: int, group: dist.ProcessGroup, sizes: tuple[int, ...], crowded: bool, capacity: float | None
) -> list[Tensor]:
    world = dist.get_world_size(group)
    share = E // world
    dispatcher = AllToAllDispatcher(E, group, capacity)
    return forward_backward(dispatcher, experts(rank * share, share), *tokens(rank, sizes, crowded))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("crowded", [False, True])
def test_ranks_compute_what_one_process_computes(ranks: Ranks, world: int, sizes: tuple[int, ...], crowded: bool) -> None:
    found = ranks.run(world, over_ranks, sizes, crowded, None)
    together = [torch.cat(parts) for parts in zip(*(tokens(rank, sizes, crowded) for rank in range(world)), strict=True)]
    expected = forward_backward(LocalDispatcher(E), experts(0, E), *together)
    for place, value in enumerate(expected):
        if place == 3:
            continue
        # Tokens and experts alike lie in rank order.
        torch.testing.assert_close(torch.cat([answer[place] for answer in found]), value, msg=f"value {place}")


def test_capacity_holds_for_the_tokens_of_each_source(ranks: Ranks) -> None:
    """Each rank's output and drops are those that it would have alone: capacity counts the source's own tokens."""
    found = ranks.run(2, over_ranks, SIZES["uneven"], True, 1.0)
    for rank, answer in enumerate(found):
        x, indices, weights, mask = tokens(rank, SIZES["uneven"], True)
        out, _, _, dropped, *_ = forward_backward(LocalDispatcher(E, 1.0), experts(0, E), x, indices, weights, mask)
        torch.testing.assert_close(answer[0], out)
        assert answer[3] == dropped
    assert any(answer[3] > 0 for answer in found)


def test_expert_major_order() -> None:
    # Two ranks sent (1, 2) and (3, 0) rows to the two experts of this rank: a | bc | def -> adef bc.
    assert expert_major(torch.tensor([[1, 2], [3, 0]]), 6).tolist() == [0, 3, 4, 5, 1, 2]


def uneven_experts(rank: int, group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError, match="num_experts=7") as caught:
        AllToAllDispatcher(7, group)
    return str(caught.value)


def test_experts_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    assert ranks.run(2, uneven_experts)[0] == "num_experts=7 cannot be split evenly over the 2 ranks of the group"
