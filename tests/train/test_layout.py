"""Layouts: what divides is chosen, what does not is refused with layouts that would."""

import pytest

from evenload.train import ConfigError
from evenload.train.config import ParallelConfig
from evenload.train.layout import Layout, choose_layout


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        (ParallelConfig(), 1, Layout(1, 1, 1)),
        (ParallelConfig(), 8, Layout(1, 8, 1)),
        (ParallelConfig(ep=4), 8, Layout(1, 8, 4)),
        (ParallelConfig(dp_replicate=2, ep=2), 8, Layout(2, 4, 2)),
        (ParallelConfig(dp_replicate=-1, dp_shard=2), 8, Layout(4, 2, 1)),
        (ParallelConfig(ep=-1), 8, Layout(1, 8, 8)),
        (ParallelConfig(dp_replicate=-1), 8, Layout(1, 8, 1)),
    ],
)
def test_minus_one_takes_what_is_left(parallel: ParallelConfig, world: int, expected: Layout) -> None:
    layout = choose_layout(parallel, world, num_experts=16)
    assert layout == expected
    assert layout.world == world
    assert layout.expert_dp * layout.ep == layout.dp_shard


@pytest.mark.parametrize(
    ("parallel", "world", "experts", "message"),
    [
        (ParallelConfig(dp_replicate=3), 8, 16, "dp_replicate = 3 does not divide the 8 ranks"),
        (ParallelConfig(dp_shard=3), 8, 16, "dp_shard = 3 does not divide the 8 ranks"),
        (ParallelConfig(dp_shard=4), 8, 16, r"dp_replicate \* dp_shard = 1 \* 4 = 4, but there are 8 ranks"),
        (ParallelConfig(ep=3), 6, 16, "ep = 3 does not divide model.num_experts = 16"),
        (ParallelConfig(dp_replicate=4, ep=4), 8, 16, "ep = 4 does not divide dp_shard = 2"),
        (ParallelConfig(ep=0), 8, 16, "parallel.ep = 0: use a number from 1, or -1"),
        (ParallelConfig(), 0, 16, "world = 0"),
    ],
)
def test_impossible_layouts_say_which_numbers_do_not_divide(
    parallel: ParallelConfig, world: int, experts: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_layout(parallel, world, experts)


def test_a_refusal_lists_layouts_that_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_layout(ParallelConfig(ep=3), 4, 16)
    listed = str(caught.value).partition("Layouts that would do: ")[2].split("; ")
    assert listed
    for text in listed:
        sizes = {key: int(value) for key, value in (part.split("=") for part in text.split())}
        assert choose_layout(ParallelConfig(**sizes), 4, 16) == Layout(**sizes)
