"""Where the time of a step goes over several ranks, and what balancing costs as models get deeper.

    python benchmarks/distributed.py                  # both tables, about ten minutes on 2 cores
    python benchmarks/distributed.py --steps 4 --layers 4 16

First table: one GPT-MoE on 1, 2 and 4 ranks of this machine, in several layouts. Tokens/s is of all ranks, in the median step.
The shares come from torch's profiler on the first rank, in other steps: "dispatch" is sorting rows, all-to-all and waiting for
it, in both directions; "FSDP" gathering parameters and reducing gradients; "balance" balance_step. Waiting for a slower rank
counts where the wait happens. More ranks than cores take turns: the table shows where time goes, not how it scales.

Second table: balance_step of every balancer on two ranks, its share of the step, its collectives and bytes, with 4, 16 and 64
layers. All balancers take turns within one run. Over gloo on CPUs, or NCCL where there is a GPU for every rank.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, record_function

from evenload.balancers.registry import BALANCERS
from evenload.models import GPT, GPTConfig, MoELayer
from evenload.train import step as step_module
from evenload.train.config import OptimConfig
from evenload.train.layout import Layout
from evenload.train.mixture import Batch
from evenload.train.optim import make_optimizer
from evenload.train.parallel import build_sharded, make_meshes
from evenload.train.step import train_step
from evenload.train.world import World

RESULTS = Path(__file__).parent / "results"
LAYOUTS = [Layout(1, 1, 1), *(Layout(1, 2, ep) for ep in (1, 2)), *(Layout(1, 4, ep) for ep in (1, 2, 4)), Layout(2, 2, 2)]
MODEL = GPTConfig(
    vocab_size=2048,
    d_model=128,
    num_layers=4,
    num_experts=16,
    top_k=2,
    expert_hidden=256,
    shared_hidden=256,
    balancers="eqb+lei",
)
DEEP = {"vocab_size": 256, "d_model": 32, "num_experts": 64, "top_k": 4, "expert_hidden": 16}
ROWS, LENGTH = 8, 256  # sequences and tokens of a step, over all ranks
DEEP_ROWS, DEEP_LENGTH = 4, 128
# What the profiler calls the parts of a step; a range inside another one of these is counted with the outer one.
PARTS = {
    "dispatch": (
        "benchmark::dispatch",
        "_c10d_functional::all_to_all",
        "GeneratedBackwardFor__c10d_functional_all_to_all",
        "_Reorder",
    ),
    "FSDP": ("FSDP::",),
    "balance": ("benchmark::balance",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps, after 3 others")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.json")
    arguments = parser.parse_args()
    layouts = []
    for layout in LAYOUTS:
        say(f"layout {layout}")
        layouts.append(
            {"layout": str(layout), "ranks": layout.world, **run(measure_layout, layout.world, layout, arguments.steps)}
        )
    balancing = []
    for layers in arguments.layers:
        say(f"every balancer with {layers} layers")
        balancing += run(measure_balancers, 2, layers, arguments.steps)
    result = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if on_gpu(4) else "cpu",
        "layouts": layouts,
        "balancing": balancing,
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".txt").write_text(table(result) + "\n")
    print(table(result))


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def on_gpu(world: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= world


def run(work: Callable[..., Any], world: int, *args: Any) -> Any:
    """`work(world, *args)` on every rank of a new group; what the first one returns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(_rank, args=(world, port, answers, work, args), nprocs=world, join=False)
    answer = answers.get()
    context.join()
    return answer


def _rank(rank: int, world: int, port: int, answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpu(world) else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    answer = work(World(rank, world, rank), device, *args)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def measure_layout(world: World, device: torch.device, layout: Layout, steps: int) -> dict[str, Any]:
    """Tokens/s, and the share of each part of a step."""
    torch.manual_seed(0)
    model = build(MODEL, layout, device)
    optimizer = make_optimizer(model, OptimConfig())
    batch = batch_of(world, ROWS, LENGTH, MODEL.vocab_size)

    def step() -> float:
        start = time.perf_counter()
        train_step(model, optimizer, [batch], clip=1.0, world=world, replicas=layout.dp_replicate)
        return time.perf_counter() - start  # train_step reads the loss, which waits for the device

    for _ in range(3):
        step()
    seconds = statistics.median(step() for _ in range(steps))
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    with watched(model):
        for _ in range(max(2, steps // 2)):
            for part, share in profiled(step).items():
                shares[part].append(share)
    medians = {part: statistics.median(values) for part, values in shares.items()}
    return {"tokens_per_second": ROWS * LENGTH / seconds, "ms": 1e3 * seconds, "shares": medians}


def build(config: GPTConfig, layout: Layout, device: torch.device) -> GPT:
    if layout.world == 1:
        return GPT(config).to(device)
    return build_sharded(
        config, make_meshes(layout, device.type, 600), device, torch.bfloat16 if device.type == "cuda" else None
    )


def batch_of(world: World, rows: int, length: int, vocabulary: int) -> Batch:
    """This rank's share of a step's sequences."""
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))[world.rank :: world.size]
    return Batch(tokens, tokens.roll(-1, 1), torch.zeros_like(tokens), (0,))


@contextlib.contextmanager
def watched(model: GPT) -> Iterator[None]:
    """Context in which the profiler sees dispatching and balancing under names of their own."""
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        for name in ("dispatch", "receive", "combine"):
            setattr(layer.dispatcher, name, named("benchmark::dispatch", getattr(layer.dispatcher, name)))
    original, step_module.balance_step = step_module.balance_step, named("benchmark::balance", step_module.balance_step)
    try:
        yield
    finally:
        step_module.balance_step = original


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*args, **options)

    return call


def profiled(step: Callable[[], float]) -> dict[str, float]:
    """Share of a step's time that each part takes on this rank's processor."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        seconds = step()
    totals = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        part = part_of(event.name)
        if part is not None and not inside_a_part(event):
            totals[part] += event.cpu_time_total / 1e6
    return {part: total / seconds for part, total in totals.items()}


def part_of(name: str) -> str | None:
    return next((part for part, beginnings in PARTS.items() if name.startswith(beginnings)), None)


def inside_a_part(event: Any) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if part_of(outer.name) is not None:
            return True
        outer = outer.cpu_parent
    return False


def measure_balancers(world: World, device: torch.device, layers: int, steps: int) -> list[dict[str, Any]]:
    """balance_step of every balancer, all taking turns: milliseconds, share of the step, collectives and bytes."""
    models = {}
    for name in BALANCERS:
        torch.manual_seed(0)
        model = build(GPTConfig(**DEEP, num_layers=layers, balancers=name), Layout(1, 2, 1), device)
        models[name] = (model, make_optimizer(model, OptimConfig()))
    batch = batch_of(world, DEEP_ROWS, DEEP_LENGTH, int(DEEP["vocab_size"]))
    meters = {name: Meter() for name in models}
    for turn in range(steps + 1):
        for name, (model, optimizer) in models.items():
            meters[name].step(model, optimizer, batch, world, keep=turn > 0)
    return [{"balancer": name, "layers": layers, **meter.summary()} for name, meter in meters.items()]


class Meter:
    """Times train_step and the balance_step inside of it, and counts what the latter sends."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.shares: list[float] = []
        self.collectives = self.bytes = 0

    def step(self, model: GPT, optimizer: torch.optim.Optimizer, batch: Batch, world: World, *, keep: bool) -> None:
        inside = 0.0
        original, all_reduce = step_module.balance_step, dist.all_reduce
        self.collectives = self.bytes = 0

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.collectives += 1
            self.bytes += tensor.nbytes
            return all_reduce(tensor, *args, **options)

        def timed(*args: Any) -> Any:
            nonlocal inside
            dist.barrier()  # else it would wait in there for the slower rank's backward
            dist.all_reduce = counted
            start = time.perf_counter()
            try:
                return original(*args)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                inside = time.perf_counter() - start
                dist.all_reduce = all_reduce

        step_module.balance_step = timed
        start = time.perf_counter()
        try:
            train_step(model, optimizer, [batch], world=world)
        finally:
            step_module.balance_step = original
        if keep:
            self.ms.append(1e3 * inside)
            self.shares.append(inside / (time.perf_counter() - start))

    def summary(self) -> dict[str, Any]:
        return {
            "ms": statistics.median(self.ms),
            "share": statistics.median(self.shares),
            "collectives": self.collectives,
            "bytes": self.bytes,
        }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, {result['cores']} cores; d_model {MODEL.d_model}, {MODEL.num_layers} layers of "
        f"{MODEL.num_experts} experts, top-{MODEL.top_k}, {MODEL.balancers}; {ROWS} x {LENGTH} tokens a step over all ranks",
        f"{'layout':<34}{'ranks':>6}{'tokens/s':>10}{'ms/step':>9}"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"{'the rest':>10}",
    ]
    for row in result["layouts"]:
        shares = [*row["shares"].values(), 1 - sum(row["shares"].values())]
        lines.append(
            f"{row['layout']:<34}{row['ranks']:>6}{row['tokens_per_second']:>10,.0f}{row['ms']:>9.0f}"
            + "".join(f"{share:>10.1%}" for share in shares)
        )
    lines += [
        "",
        f"balance_step on 2 ranks; d_model {DEEP['d_model']}, {DEEP['num_experts']} experts, top-{DEEP['top_k']}, "
        f"{DEEP_ROWS} x {DEEP_LENGTH} tokens a step",
        f"{'balancer':<14}{'layers':>7}{'ms':>9}{'of the step':>13}{'collectives':>13}{'KiB per rank':>14}",
    ]
    for row in sorted(result["balancing"], key=lambda row: (list(BALANCERS).index(row["balancer"]), row["layers"])):
        lines.append(
            f"{row['balancer']:<14}{row['layers']:>7}{row['ms']:>9.2f}{row['share']:>13.1%}{row['collectives']:>13}"
            f"{row['bytes'] / 1024:>14,.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
