"""How should balance_step combine its sums: all-reduce or all-gather? Time and bytes per step, side by side in one run.

    python benchmarks/collective.py [--layers 16] [--experts 64] [--tokens 2048] [--repeats 20]

Both give the same bits (tests/balancers/test_invariances.py), so this is about cost alone. "sent" is what one rank hands to the
collectives of a step; "received" is what an all-gather makes of it on every rank (for an all-reduce, the same as sent).
"""

import argparse
import os
import socket
import statistics
import time

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from evenload import Router, balance_step

COLLECTIVES = ("all_reduce", "all_gather")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="per rank and step")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    print(
        f"eqb, {arguments.layers} layers x {arguments.experts} experts, {arguments.tokens} tokens per rank, gloo on "
        f"{os.cpu_count()} cores, median of {arguments.repeats} steps taken in turn"
    )
    print(f"{'ranks':>5} {'collective':>11} {'ms/step':>9} {'of which communication':>23} {'sent KiB':>9} {'received KiB':>13}")
    for world in arguments.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(measure, args=(world, port, arguments), nprocs=world)


def measure(rank: int, world: int, port: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    layers = (Router(None, arguments.experts, arguments.top_k, balancers="eqb") for _ in range(arguments.layers))
    model = torch.nn.ModuleList(layers)
    seconds: dict[str, list[float]] = {name: [] for name in COLLECTIVES}
    inside: dict[str, list[float]] = {name: [] for name in COLLECTIVES}
    sent = dict.fromkeys(COLLECTIVES, 0)
    meter = _Meter()
    for _ in range(arguments.repeats + 2):
        for name in COLLECTIVES:
            for router in model:
                router(torch.randn(arguments.tokens, arguments.experts))
            dist.barrier()
            meter.seconds, meter.bytes = 0.0, 0
            start = time.perf_counter()
            balance_step(model, collective=name)
            seconds[name].append(time.perf_counter() - start)
            inside[name].append(meter.seconds)
            sent[name] = meter.bytes
    if rank == 0:
        for name in COLLECTIVES:
            received = sent[name] * (world if name == "all_gather" else 1)
            print(
                f"{world:>5} {name:>11} {1e3 * statistics.median(seconds[name][2:]):>9.1f} "
                f"{1e3 * statistics.median(inside[name][2:]):>20.1f} ms {sent[name] / 1024:>9.0f} {received / 1024:>13.0f}",
                flush=True,
            )
    dist.destroy_process_group()


class _Meter:
    """Times the two collectives that balance_step uses, and adds up what goes in."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0
        gather_name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        reduce, gather = dist.all_reduce, getattr(dist, gather_name)
        dist.all_reduce = lambda tensor, **kw: self._timed(tensor, lambda: reduce(tensor, **kw))
        setattr(dist, gather_name, lambda out, tensor, **kw: self._timed(tensor, lambda: gather(out, tensor, **kw)))

    def _timed(self, tensor, call):
        start = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - start
        self.bytes += tensor.numel() * tensor.element_size()
        return result


if __name__ == "__main__":
    main()
