"""The statistic of 1, 2, 3, 4 ranks with even, uneven and empty shards equals the sort of the union."""

import pytest
import torch
from torch import distributed as dist

from evenload import Router, balance_step, global_order_statistic

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), 9.2e-41, -9.2e-41, 1.0, 1.0, -1.0, 3.3e38, -3.3e38, 1.17e-38]


def sample(kind: str, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    if kind == "normal":
        values = torch.randn(rows, columns, generator=generator)
    elif kind == "ties":
        values = torch.randint(-2, 3, (rows, columns), generator=generator).float()
    else:
        values = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (rows, columns), generator=generator)]
    return values.bfloat16()


def shards(values: torch.Tensor, world: int, split: str) -> list[torch.Tensor]:
    rows = len(values)
    if split == "even":
        return list(values.tensor_split(world))
    cuts = [rows * (i + 1) ** 2 // world**2 for i in range(world - 1)] if split == "uneven" else [0] * (world - 1)
    return list(values.tensor_split(cuts))


def every_statistic(rank, group, parts, ranks_from_top, collective):
    return [global_order_statistic(parts[rank], k, group, collective=collective) for k in ranks_from_top]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_the_sort_of_the_union(ranks, world, collective):
    for kind in ("normal", "ties", "special"):
        for split in ("even", "uneven", "empty"):
            values = sample(kind, 37, 3)
            parts = shards(values, world, split)
            positions = [0, 1, 18, 35, 36]
            expected = (values.float() + 0.0).sort(dim=0, descending=True).values[positions].bfloat16()
            for found in ranks.run(world, every_statistic, parts, positions, collective):
                got = torch.stack(found)
                assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), (kind, split)


def test_one_rank_per_column():
    values = sample("normal", 9, 4)
    ranks_from_top = torch.tensor([0, 3, 5, 8])
    found = global_order_statistic(values, ranks_from_top)
    assert torch.equal(found, values.sort(dim=0, descending=True).values[ranks_from_top, torch.arange(4)])


def test_a_vector_gives_a_scalar():
    assert global_order_statistic(torch.arange(5).bfloat16(), 1).item() == 3


@pytest.mark.parametrize(
    ("values", "rank", "complaint"),
    [
        (torch.ones(3), 0, "bfloat16"),
        (torch.ones(3).bfloat16(), 3, r"rank_from_top=3 with 3 values.*0\.\.2"),
        (torch.ones(3).bfloat16(), -1, "rank_from_top=-1"),
        (torch.ones(0).bfloat16(), 0, "with 0 values"),
        (torch.tensor([1.0, float("nan")]).bfloat16(), 0, "NaN"),
        (torch.ones(1, 1, 1).bfloat16(), 0, "shape"),
    ],
)
def test_refuses(values, rank, complaint):
    with pytest.raises(ValueError, match=complaint):
        global_order_statistic(values, rank)


def collectives_of_a_model(rank, group, spec, layers, collective):
    """The collectives that one balance_step starts, by name."""
    model = torch.nn.ModuleList(Router(None, 16, 2, balancers=spec) for _ in range(layers))
    for router in model:
        router(torch.randn(8, 16))
    calls = []

    def counted(original):
        return lambda *args, **kw: (calls.append(original.__name__), original(*args, **kw))

    everything = [name for name in vars(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send"))]
    originals = {name: getattr(dist, name) for name in everything if callable(getattr(dist, name))}
    try:
        for name, original in originals.items():
            setattr(dist, name, counted(original))
        balance_step(model, group, collective=collective)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(("spec", "rounds"), [("eqb+lei", 2), ("qb", 1), ("qb_histogram", 1), ("loss_free", 1), ("phi", 1)])
def test_a_whole_model_costs_one_collective_per_round(ranks, spec, rounds, collective):
    for layers in (1, 7):
        for calls in ranks.run(2, collectives_of_a_model, spec, layers, collective):
            assert len(calls) == rounds
            assert all(call.startswith(collective) for call in calls)
    for calls in ranks.run(1, collectives_of_a_model, spec, 3, collective):
        assert calls == []
