"""How ranks are laid out: arithmetic alone, so that a layout can be refused, or planned, without any process.

Dense parameters live on the mesh (dp_replicate, dp_shard). Experts borrow the same ranks as (dp_replicate, expert_dp, ep):
neighbouring ranks hold different experts, and expert_dp = dp_shard / ep of them shard each expert's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import ParallelConfig

SHOWN = 6  # layouts that an error lists


@dataclass(frozen=True)
class Layout:
    """Sizes of the meshes; world = dp_replicate * dp_shard, dp_shard = expert_dp * ep."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def expert_dp(self) -> int:
        return self.dp_shard // self.ep

    def __str__(self) -> str:
        return f"dp_replicate={self.dp_replicate} dp_shard={self.dp_shard} ep={self.ep}"


def choose_layout(parallel: ParallelConfig, world: int, num_experts: int) -> Layout:
    """The layout of `world` ranks that `parallel` asks for; -1 takes what the other numbers leave.

    Raises ConfigError that says which numbers do not divide, and lists layouts that would do.
    """
    if world < 1:
        raise ConfigError(f"world = {world}: there is at least one rank")
    asked = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard, "ep": parallel.ep}
    for name, size in asked.items():
        if size < 1 and size != -1:
            raise ConfigError(f"parallel.{name} = {size}: use a number from 1, or -1 for what the others leave")
    possible = [layout for layout in _layouts(world, num_experts) if _fits(layout, asked)]
    if not possible:
        near = [layout for layout in _layouts(world, num_experts) if layout.dp_replicate == 1 or parallel.dp_replicate > 1]
        near.sort(key=lambda layout: sum(getattr(layout, name) != size for name, size in asked.items() if size != -1))
        listed = "; ".join(map(str, near[:SHOWN]))
        raise ConfigError(f"parallel: {_reason(asked, world, num_experts)}. Layouts that would do: {listed}")
    # What -1 leaves open goes to sharding first, then to experts: the smallest memory, then the fewest experts per rank.
    return min(possible, key=lambda layout: (layout.dp_replicate, -layout.ep))


def microbatches(batch: int, microbatch: int, world: int) -> int:
    """Microbatches of each of `world` ranks in a step of `batch` sequences; ConfigError where that is not a whole number."""
    if batch % (microbatch * world):
        raise ConfigError(
            f"run.batch = {batch}: {world} ranks with microbatches of run.microbatch = {microbatch} need a "
            f"multiple of {microbatch * world}"
        )
    return batch // (microbatch * world)


def _layouts(world: int, num_experts: int) -> list[Layout]:
    return [
        Layout(world // dp_shard, dp_shard, ep)
        for dp_shard in _divisors(world)[::-1]
        for ep in _divisors(dp_shard)
        if num_experts % ep == 0
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _fits(layout: Layout, asked: dict[str, int]) -> bool:
    return all(size in (-1, getattr(layout, name)) for name, size in asked.items())


def _reason(asked: dict[str, int], world: int, num_experts: int) -> str:
    replicate, shard, ep = asked["dp_replicate"], asked["dp_shard"], asked["ep"]
    if replicate != -1 and world % replicate:
        return f"dp_replicate = {replicate} does not divide the {world} ranks"
    if shard != -1 and world % shard:
        return f"dp_shard = {shard} does not divide the {world} ranks"
    if -1 not in (replicate, shard) and replicate * shard != world:
        return f"dp_replicate * dp_shard = {replicate} * {shard} = {replicate * shard}, but there are {world} ranks"
    if ep != -1 and num_experts % ep:
        return f"ep = {ep} does not divide model.num_experts = {num_experts}"
    if shard == -1:
        shard = world // max(1, replicate)
    return f"ep = {ep} does not divide dp_shard = {shard}"
