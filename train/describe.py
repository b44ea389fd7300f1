"""What a configuration needs before it runs: parameters, memory of a rank, arithmetic and traffic. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from .config import Config
from .describe_meter import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS
from .describe_size import Size, measure_size
from .describe_step import peaks, rehearse
from .errors import ConfigError
from .layout import Layout, choose_layout, microbatches

GIB, GB = 2**30, 1e9
KINDS = {  # of memory, as the table calls them
    PARAMETERS: "parameters",
    OPTIMIZER: "optimizer (two moments)",
    GRADIENTS: "gradients",
    GATHERED: "gathered weights, whole gradients",
    "balancers": "what balancers keep of the step",
    ACTIVATIONS: "activations",
}
TRAFFIC = {  # (what, operation) of collectives, as the table calls them
    ("weights", "all_gather"): "all-gather, all weights",
    ("weights", "reduce_scatter"): "reduce-scatter, all gradients",
    ("weights", "all_reduce"): "all-reduce, all gradients",
    ("dense", "all_gather"): "all-gather, dense weights",
    ("dense", "reduce_scatter"): "reduce-scatter, dense gradients",
    ("dense", "all_reduce"): "all-reduce, dense gradients",
    ("experts", "all_gather"): "all-gather, experts",
    ("experts", "reduce_scatter"): "reduce-scatter, experts",
    ("experts", "all_reduce"): "all-reduce, experts",
    ("rows", "all_to_all"): "all-to-all, rows",
    ("counts", "all_to_all"): "all-to-all, counts of rows",
    ("injection", "all_reduce"): "all-reduce, counts for lei",
    ("balancing", "all_reduce"): "all-reduce, balancing",
}


@dataclass(frozen=True)
class Description:
    """A configuration on a layout of ranks.

    Attributes:
        layout: of the ranks.
        precision: "bf16" or "fp32", of activations and of the weights that travel; parameters, gradients and moments are fp32.
        size: parameters and FLOPs per token.
        microbatches: per rank and step.
        held: bytes on one rank: "parameters", "gradients", "optimizer", "activations" (what a forward leaves for its
            backward), "balancers" (what they keep of the step).
        peak: bytes by kind when most are alive in the step.
        peak_at: the part of the step where that is.
        traffic: {what: (collectives, bytes that leave one rank)} per optimizer step.
    """

    config: Config
    layout: Layout
    precision: str
    size: Size
    microbatches: int
    held: dict[str, int]
    peak: dict[str, int]
    peak_at: str
    traffic: dict[str, tuple[int, int]]

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        return self.config.run.batch * self.config.run.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Every number, in parameters, FLOPs, bytes and tokens, as plain types."""
        run, layout, size = self.config.run, self.layout, self.size
        return {
            "layout": {
                "world": layout.world,
                "dp_replicate": layout.dp_replicate,
                "dp_shard": layout.dp_shard,
                "ep": layout.ep,
                "expert_dp": layout.expert_dp,
                "experts_per_rank": self.config.model.num_experts // layout.ep,
            },
            "precision": self.precision,
            "activation_checkpointing": run.activation_checkpointing,
            "parameters": {"total": sum(size.total.values()), "active": sum(size.active.values())},
            "parts": {part: {"total": size.total[part], "active": size.active[part]} for part in size.total},
            "flops_per_token": {"weights": size.weight_flops, "attention": size.attention_flops, "all": size.flops},
            "step": {"sequences": run.batch, "tokens": self.tokens, "microbatches_per_rank": self.microbatches},
            "run": {"steps": run.steps, "tokens": run.steps * self.tokens, "flops": run.steps * self.tokens * size.flops},
            "memory_per_rank": self.held | {"peak": sum(self.peak.values()), "peak_at": self.peak_at, "at_peak": self.peak},
            "checkpoint": self._checkpoint(),
            "sent_per_rank_and_step": {
                what: {"collectives": calls, "bytes": sent} for what, (calls, sent) in self.traffic.items()
            },
        }

    def table(self) -> str:
        """All of it on one screen."""
        run, layout, size = self.config.run, self.layout, self.size
        experts = self.config.model.num_experts
        flops_per_rank = size.flops * self.tokens / layout.world
        sent = sum(sent for _, sent in self.traffic.values())
        lines = [
            f"{layout.world} {'ranks' if layout.world > 1 else 'rank'}: {layout} expert_dp={layout.expert_dp}, "
            f"{experts // layout.ep} of {experts} experts on each rank",
            f"{self.precision}, activation checkpointing {run.activation_checkpointing}, every expert equally popular",
            "",
            f"{'parameters':<34}{'total':>12}{'active':>12}",
            *(f"  {part:<32}{_count(size.total[part]):>12}{_count(size.active[part]):>12}" for part in size.total),
            f"  {'all':<32}{_count(sum(size.total.values())):>12}{_count(sum(size.active.values())):>12}",
            "",
            f"step         {_count(self.tokens)} tokens: {run.batch:,} sequences of {run.seq_len:,}; "
            f"each rank has {self.microbatches} x {run.microbatch}",
            f"run          {run.steps:,} steps, {_count(run.steps * self.tokens)} tokens, "
            f"{run.steps * self.tokens * size.flops:.2e} FLOPs",
            f"arithmetic   {_count(size.flops)} FLOPs per token, forward and backward: {_count(size.weight_flops)} weights, "
            f"{_count(size.attention_flops)} attention",
            f"             {_count(flops_per_rank)} FLOPs per rank and step"
            + (f", {flops_per_rank / sent:,.0f} per byte that it sends" if sent else ""),
            f"checkpoint   {self._checkpoint() / GB:,.3g} GB on disk, of which run.keep_last = {run.keep_last} stay",
            "",
            f"{'memory of a rank, GiB':<34}{'held':>12}{'at the peak':>12}",
            *(
                f"  {title:<32}{_cell(self.held.get(kind), GIB):>12}{_cell(self.peak.get(kind), GIB):>12}"
                for kind, title in KINDS.items()
                if self.held.get(kind) or self.peak.get(kind)
            ),
            f"  {'peak: ' + self.peak_at:<32}{'':>12}{_cell(sum(self.peak.values()), GIB):>12}",
        ]
        if self.traffic:
            lines += [
                "",
                f"{'sent by a rank per step, GB':<34}{'collectives':>12}{'GB':>12}",
                *(f"  {what:<32}{calls:>12,}{_cell(sent, GB):>12}" for what, (calls, sent) in self.traffic.items()),
                f"  {'all':<32}{sum(calls for calls, _ in self.traffic.values()):>12,}{_cell(sent, GB):>12}",
            ]
        return "\n".join(lines)

    __str__ = table

    def _checkpoint(self) -> int:
        return 3 * 4 * sum(self.size.total.values())  # fp32 parameters and two moments


def describe(config: Config, world: int | None = None) -> Description:
    """Describe what `config` needs on `world` ranks (None = the fewest that its layout takes), of which all are alike.

    Nothing is allocated, read or sent: see `rehearse`. Every expert is taken to be as popular as any other.

    Raises:
        ConfigError: for a layout or a batch that does not divide, with the layouts that would do; and for balancers of one's
            own whose step depends on values, such as by `.item()`.
    """
    parallel = config.parallel
    if world is None:
        world = max(1, parallel.dp_replicate) * max(1, parallel.dp_shard, parallel.ep)
    layout = choose_layout(parallel, world, config.model.num_experts)
    share = microbatches(config.run.batch, config.run.microbatch, world)
    bf16 = config.run.precision == "bf16" or (config.run.precision == "auto" and not config.run.device.startswith("cpu"))
    try:
        numbers = rehearse(config, layout, torch.bfloat16 if bf16 else None)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"model.balancers = {config.model.balancers!r}: a step without numbers cannot go on at {error.func}; a balancer of "
            "your own must not read values (.item(), .tolist(), if, boolean indices)"
        ) from error
    stretch, peak = max(peaks(numbers).items(), key=lambda item: sum(item[1].values()))
    kept = min(round(numbers["balancers",]), peak.get(ACTIVATIONS, 0))
    peak |= {ACTIVATIONS: peak.get(ACTIVATIONS, 0) - kept, "balancers": kept}
    held = {kind: round(numbers[kind,]) for kind in (PARAMETERS, OPTIMIZER, GRADIENTS, "balancers")}
    traffic = {
        title: (round(numbers["calls", what, operation]), round(numbers["bytes", what, operation]))
        for (what, operation), title in TRAFFIC.items()
        if ("calls", what, operation) in numbers
    }
    return Description(
        config=config,
        layout=layout,
        precision="bf16" if bf16 else "fp32",
        size=measure_size(config.model, config.run.seq_len),
        microbatches=share,
        held=held | {ACTIVATIONS: round(numbers["saved",])},
        peak=peak,
        peak_at=stretch,
        traffic=traffic,
    )


def _count(number: float) -> str:
    """Four digits and a letter: 78,102,931,200 -> 78.10B."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f}{letter}"
    return f"{number:.0f}"


def _cell(size: int | None, unit: float) -> str:
    return "-" if size is None else f"{size / unit:,.3f}" if size else "0"
