"""Where the time of a distributed training step goes, and what balancing a model costs in it.

    python benchmarks/distributed.py              # both tables; results/distributed.json and .txt
    python benchmarks/distributed.py --quick      # the same on fewer turns and shallower models, not kept

The first table trains one model over 1, 2 and 4 ranks of this machine; the layouts of a world size take turns. Every rank has
as many tokens whatever the layout. tokens/s is of all ranks, from steps that nothing watches. The shares are from further steps
under torch.profiler, averaged over ranks. What counts, forward and backward, as

    FSDP       the ranges that FSDP2 marks: parameters gathered and freed, gradients reduced
    dispatch   the dispatcher's three methods and the autograd nodes they made: permutation, all-to-all, combination
    balance    balance_step
    optimizer  the update
    rest       the model itself, and the sums of loss and gradient norm

includes the wait for slower ranks. Ranks on fewer cores wait for each other's turn, so the tables say where time goes and
nothing about scaling.

The second table has every registered balancer with 4, 16 and 64 MoE layers on 2 ranks: the time of balance_step, its share of
the step, and what it hands to the network. The model is narrow, so that 64 layers fit: balance_step does not depend on the
width of the model and everything else does, so its share of a wider model's step is smaller.

Ranks have a GPU each and NCCL where there are enough of them, else CPU and gloo. On GPUs the shares are of the host's time.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from evenload.balancers import balance_step
from evenload.balancers.registry import BALANCERS
from evenload.models import GPT, GPTConfig
from evenload.train import step as step_module
from evenload.train.config import OptimConfig
from evenload.train.layout import Layout
from evenload.train.mixture import Batch
from evenload.train.optim import make_optimizer
from evenload.train.parallel import build_sharded, make_meshes, moe_layers
from evenload.train.runtime import choose_device, tune_allocator
from evenload.train.world import World, joined

RESULTS = Path(__file__).parent / "results"
LAYOUTS = {
    1: [Layout()],
    2: [Layout(1, 2, 1), Layout(1, 2, 2)],
    4: [Layout(1, 4, 1), Layout(1, 4, 2), Layout(1, 4, 4), Layout(2, 2, 2)],
}
PARTS = ("FSDP", "dispatch", "balance", "optimizer")  # a moment that two of them claim belongs to the first
SPECS = ("none", *BALANCERS, "eqb+lei")
WARM_UP = 2
MODEL = GPTConfig(d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, num_experts=16, top_k=2, expert_hidden=256)
ROWS, LENGTH = 4, 128
NARROW = GPTConfig(
    vocab_size=256, d_model=64, num_layers=4, num_heads=2, num_kv_heads=1, num_experts=32, top_k=4, expert_hidden=16
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 turns, 4 and 16 layers; nothing is written without --out")
    parser.add_argument("--turns", type=int, help="steps of a layout, and of a balancer with 4 layers; fewer with more (20)")
    parser.add_argument("--layers", type=int, nargs="+", help="of the second table (default 4 16 64)")
    parser.add_argument("--out", type=Path, help="default results/distributed.json; the table goes beside it as .txt")
    arguments = parser.parse_args()
    turns = arguments.turns or (3 if arguments.quick else 20)
    layers = arguments.layers or ([4, 16] if arguments.quick else [4, 16, 64])
    if turns < 2:
        sys.exit(f"--turns {turns}: a median wants at least 2")
    tasks = [(world, layouts_of_a_world, (turns, 1 if arguments.quick else 3)) for world in LAYOUTS]
    tasks += [(2, balancers_of_a_depth, (depth, max(3, turns * 4 // depth))) for depth in layers]
    busy = os.getloadavg()[0]
    answers = [run(*task) for task in tasks]
    result = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": {"before": busy, "after": os.getloadavg()[0]},
        "turns": turns,
        "layouts": [row for answer in answers[: len(LAYOUTS)] for row in answer],
        "balancers": [row for answer in answers[len(LAYOUTS) :] for row in answer],
    }
    text = table(result)
    print(text)
    out = arguments.out or (None if arguments.quick else RESULTS / "distributed.json")
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        out.with_suffix(".txt").write_text(text + "\n")


def run(world: int, work: Any, options: tuple[Any, ...]) -> list[dict[str, Any]]:
    """What `work(world, device, *options)` returns on the first of `world` new processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.spawn(_rank, args=(world, port, work, options, answer), nprocs=world)
        return json.loads(answer.read_text())


def _rank(rank: int, size: int, port: int, work: Any, options: tuple[Any, ...], answer: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tune_allocator()
    torch.set_num_threads(1)
    world = World(rank, size, rank, timeout=120.0)
    device = choose_device("cuda" if torch.cuda.device_count() >= size else "cpu", rank)
    with joined(world, device):
        rows = work(world, device, *options)
    if rank == 0:
        answer.write_text(json.dumps(rows))


def layouts_of_a_world(world: World, device: torch.device, turns: int, profiled: int) -> list[dict[str, Any]]:
    """Rows of the first table: every layout of `world` takes a step in every turn."""
    trainers = [Trainer(MODEL, layout, world, device) for layout in LAYOUTS[world.size]]
    for _ in progress(f"{world.size} rank(s)", turns + WARM_UP, world):
        for trainer in trainers:
            trainer.step()
    rows = []
    for trainer in trainers:
        shares = [trainer.profiled_step() for _ in range(profiled)]
        own = {part: statistics.median(share[part] for share in shares) for part in PARTS}
        everybody = gathered((own, trainer.seconds[WARM_UP:]), world)
        seconds = statistics.median(max(times) for times in zip(*(times for _, times in everybody), strict=True))
        rows.append({
            **dataclasses.asdict(trainer.layout), "device": device.type, "ms": 1e3 * seconds,
            "tokens_per_second": world.size * ROWS * LENGTH / seconds,
            "shares": {part: statistics.fmean(share[part] for share, _ in everybody) for part in PARTS},
        })  # fmt: skip
    return rows


def balancers_of_a_depth(world: World, device: torch.device, depth: int, turns: int) -> list[dict[str, Any]]:
    """Rows of the second table: models of `depth` layers, one per balancer, take a step each in every turn."""
    config = dataclasses.replace(NARROW, num_layers=depth)
    layout = Layout(1, world.size, 1)
    trainers = {
        spec: Trainer(dataclasses.replace(config, balancers=spec), layout, world, device)
        for spec in progress_over(SPECS, f"{depth} layers, building", world)
    }
    for _ in progress(f"{depth} layers", turns + WARM_UP, world):
        for trainer in trainers.values():
            trainer.step()
    rows = []
    for spec, trainer in trainers.items():
        milliseconds = [1e3 * seconds for seconds in trainer.balancing[WARM_UP:]]
        shares = [a / b for a, b in zip(trainer.balancing[WARM_UP:], trainer.seconds[WARM_UP:], strict=True)]
        rows.append({
            "balancer": spec, "layers": depth, "steps": turns, "device": device.type, "ms": statistics.median(milliseconds),
            "share": statistics.median(shares), "step_ms": 1e3 * statistics.median(trainer.seconds[WARM_UP:]),
            "collectives": trainer.meter.calls, "bytes": trainer.meter.bytes,
        })  # fmt: skip
    return rows


class Trainer:
    """A model in a layout, the seconds of its steps, and what balance_step sent in the last one."""

    def __init__(self, config: GPTConfig, layout: Layout, world: World, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layout, self.world, self.device = layout, world, device
        if world.size > 1:
            self.model: GPT = build_sharded(config, make_meshes(layout, device.type, world.timeout), device, None)
        else:
            self.model = GPT(config).to(device)
        self.optimizer = make_optimizer(self.model, OptimConfig())
        generator = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
        self.batch = Batch(tokens, tokens.roll(-1, 1), torch.zeros_like(tokens), (0,) * ROWS)
        self.meter = Meter()
        self.seconds: list[float] = []
        self.balancing: list[float] = []

    def step(self) -> None:
        if self.world.size > 1:
            dist.barrier()
        with patched(step_module, "balance_step", self._balance):
            start = self._now()
            result = step_module.train_step(
                self.model, self.optimizer, [self.batch], world=self.world, replicas=self.layout.dp_replicate
            )
            self.seconds.append(self._now() - start)
        if not result.good:
            raise RuntimeError(f"{self.layout}: non-finite loss or gradient")

    def profiled_step(self) -> dict[str, float]:
        """{part: its share of a step}."""
        nodes: list[tuple[int, int]] = []
        layers = moe_layers(self.model)
        plain = [layer.dispatcher for layer in layers]
        for layer in layers:
            layer.dispatcher = WatchedDispatcher(layer.dispatcher, nodes)
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
            self.step()
        for layer, dispatcher in zip(layers, plain, strict=True):
            layer.dispatcher = dispatcher
        self.seconds.pop()
        self.balancing.pop()
        return shares_of(profiler.events(), nodes)

    def _balance(self, model: nn.Module) -> Any:
        with record_function("balance"), self.meter.watch():
            start = self._now()
            report = balance_step(model)
            self.balancing.append(self._now() - start)
        return report

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class WatchedDispatcher:
    """A dispatcher whose calls are ranges of the profile; `nodes` gets which autograd nodes they made."""

    def __init__(self, inner: Any, nodes: list[tuple[int, int]]) -> None:
        self.inner, self.nodes = inner, nodes
        self.capacity_factor = inner.capacity_factor

    def dispatch(self, x: Tensor, indices: Tensor, mask: Tensor | None = None, *, limited: bool = True) -> Any:
        with self._range():
            return self.inner.dispatch(x, indices, mask, limited=limited)

    def receive(self, rows: Tensor, plan: Any) -> Tensor:
        with self._range():
            return self.inner.receive(rows, plan)

    def combine(self, rows: Tensor, weights: Tensor, plan: Any) -> Tensor:
        with self._range():
            return self.inner.combine(rows, weights, plan)

    @contextlib.contextmanager
    def _range(self) -> Iterator[None]:
        first = torch.autograd._get_sequence_nr()
        with record_function("dispatch"):
            yield
        self.nodes.append((first, torch.autograd._get_sequence_nr()))


class Meter:
    """Counts what a step's balance_step hands to collectives: calls, and bytes per rank."""

    def __init__(self) -> None:
        self.calls = self.bytes = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        self.calls = self.bytes = 0
        all_reduce = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.bytes += tensor.numel() * tensor.element_size()
            return all_reduce(tensor, *args, **kwargs)

        with patched(dist, "all_reduce", counted), contextlib.ExitStack() as refused:
            for name in ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single", "broadcast"):
                if hasattr(dist, name):
                    refused.enter_context(patched(dist, name, _uncounted))
            yield


def _uncounted(*_: Any, **__: Any) -> Any:
    raise RuntimeError("balance_step used a collective that this benchmark does not count")


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def shares_of(events: Any, nodes: list[tuple[int, int]]) -> dict[str, float]:
    """{part: its share of the range "step"}; no moment counts twice.

    nodes: [first, last) sequence numbers of the autograd nodes that dispatching made.
    """
    dispatching = {number for first, last in nodes for number in range(first, last)}
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    whole = 0.0
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        span = (event.time_range.start, event.time_range.end)
        if event.name == "step":
            whole = span[1] - span[0]
        elif event.name.startswith("FSDP::"):
            spans["FSDP"].append(span)
        elif event.name in ("dispatch", "balance"):
            spans[event.name].append(span)
        elif event.name.startswith("Optimizer.step#"):
            spans["optimizer"].append(span)
        elif event.name.startswith("autograd::engine::evaluate_function") and event.sequence_nr in dispatching:
            spans["dispatch"].append(span)
    shares, taken, before = {}, [], 0.0
    for part in PARTS:
        taken += spans[part]
        covered = length_of_union(taken)
        shares[part] = (covered - before) / whole
        before = covered
    return shares


def length_of_union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gathered(value: Any, world: World) -> list[Any]:
    """Every rank's value, in rank order."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def progress(what: str, total: int, world: World) -> Iterator[int]:
    """0 ... total - 1; the first rank says how far it is, and how long the rest will take."""
    return progress_over(range(total), what, world)


def progress_over(items: Any, what: str, world: World) -> Iterator[Any]:
    began = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if world.is_main:
            left = (time.monotonic() - began) / done * (len(items) - done)
            print(f"{what}: {done}/{len(items)}, {left:.0f} s left", file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    load = result["load"]
    lines = [
        f"torch {result['torch']}, {result['cores']} cores, one thread per rank; load average before and after: "
        f"{load['before']:.1f} and {load['after']:.1f}",
        "",
        f"{describe(MODEL)}, eqb+lei, fp32; {ROWS} x {LENGTH} tokens per rank and step; median of {result['turns']} steps",
        f"{'ranks':>5} {'layout':<34} {'':>5} {'tokens/s':>9} {'ms/step':>8}" + "".join(f"{p:>11}" for p in (*PARTS, "rest")),
    ]
    for row in result["layouts"]:
        layout = Layout(row["dp_replicate"], row["dp_shard"], row["ep"])
        shares = [row["shares"][part] for part in PARTS]
        cells = "".join(f"{share:>11.1%}" for share in (*shares, 1 - sum(shares)))
        over = "  more ranks than cores" if row["device"] == "cpu" and layout.world > result["cores"] else ""
        lines.append(
            f"{layout.world:>5} {layout!s:<34} {row['device']:>5} {row['tokens_per_second']:>9,.0f} {row['ms']:>8.0f}"
            f"{cells}{over}"
        )
    lines += [
        "shares of the step, waiting for other ranks included; where time goes, not how it scales",
        "",
        f"balance_step on 2 ranks: {describe(NARROW)}; {ROWS} x {LENGTH} tokens per rank and step",
        f"{'balancer':<14}{'layers':>7}{'steps':>7}{'ms':>9}{'ms/step':>9}{'share':>8}{'collectives':>13}{'bytes/rank':>16}",
    ]
    for spec in dict.fromkeys(row["balancer"] for row in result["balancers"]):
        lines += [
            f"{spec:<14}{row['layers']:>7}{row['steps']:>7}{row['ms']:>9.2f}{row['step_ms']:>9.0f}{row['share']:>8.1%}"
            f"{row['collectives']:>13}{row['bytes']:>16,}"
            for row in result["balancers"]
            if row["balancer"] == spec
        ]
    return "\n".join(lines)


def describe(config: GPTConfig) -> str:
    return (
        f"d_model {config.d_model}, {config.num_experts} experts of {config.expert_hidden}, top_k {config.top_k}, "
        f"vocab {config.vocab_size}"
    )


if __name__ == "__main__":
    main()
