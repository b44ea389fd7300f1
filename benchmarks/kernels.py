"""What the kernels and their torch twins cost.

    python -P benchmarks/kernels.py                     # on a CPU, 20 seconds: results/kernels-cpu.json and .txt
    python -P benchmarks/kernels.py --device cuda       # on a GPU: results/kernels-CARD.json and .txt

On a CPU: the twin beside the torch that one would write by hand (topk, gather, bincount, a sort of the choice), which
leaves ties to chance and has no cutoff for balancers; and the exact quantile of one rank beside `kthvalue` in three layouts.
Peak memory is the sum of what the allocator handed out and took back, so it does not depend on the machine.

On a GPU: each kernel beside its twin and torch.compile of the twin. The share of the bandwidth is the bytes that cannot be
avoided (inputs read once, outputs written once) per second, over those of a copy of 1 GiB in the same run. Then every
kernel runs 200 times and must give the same bits each time: races do not show in the interpreter.

The contestants take turns, and a ratio is formed within a turn, so a busy machine slows both. On a CPU, "cpu" is the
process's own time, which does not count what other programs took.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from evenload.balancers.collective import run_lockstep
from evenload.balancers.order_statistic import Bf16Columns, order_statistic_rounds
from evenload.kernels import canonical, high_byte_histogram, margin, ops, permutation, radix, router
from evenload.kernels.backend import INSTALLED
from evenload.train.runtime import tune_allocator

RESULTS = Path(__file__).parent / "results"
TOKENS, EXPERTS = (4096, 16384, 65536), (16, 64, 256)
GPU_TOKENS, GPU_EXPERTS, WIDTH = 65536, (64, 128, 256), 2048
REPEATS = 200
Call = Callable[[], Any]
OPTIONS: dict[str, Any] = {
    "mask_T": None,
    "replay_TK": None,
    "score": "sigmoid",
    "space": "logits",
    "normalize": True,
    "scale": 1.0,
    "num_groups": None,
    "group_top_k": None,
    "nan": "raise",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the results", default=RESULTS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not (torch.cuda.is_available() and INSTALLED):
        sys.exit("--device cuda needs a GPU that torch can see, and triton")
    tune_allocator()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    result: dict[str, Any] = {"torch": torch.__version__, "threads": arguments.threads, "turns": arguments.turns}
    if arguments.device == "cpu":
        name = "cpu"
        result |= {"load": os.getloadavg()[0], "routing": on_cpu(arguments.turns), "quantile": quantile(arguments.turns)}
        text = cpu_table(result)
    else:
        card = torch.cuda.get_device_name()
        name = re.sub(r"\W+", "-", card).strip("-").lower()
        result |= {"card": card, **on_gpu(arguments.turns)}
        text = gpu_table(result)
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / f"kernels-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / f"kernels-{name}.txt").write_text(text + "\n")
    print(text)
    if result.get("races"):
        sys.exit(f"bits differ between runs: {result['races']}")


def by_hand(logits_TE: Tensor, bias_E: Tensor, k: int) -> tuple[Tensor, ...]:
    scores_TE = logits_TE.sigmoid()
    indices_TK = (logits_TE + bias_E).topk(k, dim=-1).indices
    weights_TK = scores_TE.gather(1, indices_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    counts_E = torch.bincount(indices_TK.flatten(), minlength=logits_TE.shape[1])
    order_N = indices_TK.flatten().sort(stable=True).indices
    return indices_TK, weights_TK, counts_E, order_N


def by_twin(logits_TE: Tensor, bias_E: Tensor, k: int) -> tuple[Tensor, ...]:
    rows = router.route_rows(logits_TE, k, bias=bias_E, **OPTIONS)
    order_N, _ = permutation.expert_order(rows.indices, logits_TE.shape[1])
    return rows.indices, rows.weights, rows.counts, order_N


def on_cpu(turns: int) -> list[dict[str, Any]]:
    rows = []
    for tokens in TOKENS:
        for experts in EXPERTS:
            k = min(8, experts // 4)
            arguments = torch.randn(tokens, experts), torch.randn(experts), k
            for found, expected in zip(by_twin(*arguments), by_hand(*arguments), strict=True):
                torch.testing.assert_close(found, expected)  # random numbers have no ties
            calls = {"twin": lambda a=arguments: by_twin(*a), "by hand": lambda a=arguments: by_hand(*a)}
            times = take_turns(calls, turns)
            peaks = {name: peak(call) for name, call in calls.items()}
            rows.append({"tokens": tokens, "experts": experts, "k": k, "seconds": times, "peak": peaks})
            print(f"[{len(rows)}/{len(TOKENS) * len(EXPERTS)}] {tokens} tokens, {experts} experts", file=sys.stderr, flush=True)
    return rows


def quantile(turns: int, tokens: int = 65536, experts: int = 64, k: int = 8) -> dict[str, Any]:
    """The local pass of the exact quantile: bf16 margins in, the (T K / E + 1)-th largest of every column out."""
    logits_TE = torch.randn(tokens, experts) + torch.randn(experts)
    cutoff_T = logits_TE.topk(k + 1, dim=1).values[:, -1]
    values_TE = (logits_TE - cutoff_T[:, None]).bfloat16()
    rank = tokens * k // experts

    def ours() -> Tensor:
        columns, values = Bf16Columns(), canonical(values_TE)
        columns.add(values, high_byte_histogram(values))
        rounds = order_statistic_rounds(columns, torch.tensor(tokens), lambda _: torch.tensor(rank), experts)
        [(statistic_E, _)] = run_lockstep([rounds], None, "all_reduce")
        return statistic_E

    calls: dict[str, Call] = {
        "ours": ours,
        "kthvalue, float32": lambda: values_TE.float().kthvalue(tokens - rank, dim=0).values,
        "kthvalue, bfloat16": lambda: values_TE.kthvalue(tokens - rank, dim=0).values,
        "kthvalue, float32, transposed": lambda: values_TE.float().T.contiguous().kthvalue(tokens - rank, dim=1).values,
    }
    expected = calls["kthvalue, float32"]()
    for name, call in calls.items():
        if not torch.equal(call().float(), expected):
            raise ValueError(f"{name} finds another quantile")
    peaks = {name: peak(call) for name, call in calls.items()}
    return {"tokens": tokens, "experts": experts, "k": k, "seconds": take_turns(calls, turns), "peak": peaks}


def take_turns(calls: dict[str, Call], turns: int) -> dict[str, list[tuple[float, float]]]:
    """{name: (wall, cpu) seconds of every turn}, after one turn to warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def peak(call: Call) -> int:
    """Most bytes that tensors made by this call held at one time on the CPU, its results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    changes = [
        (event.start_ns(), event.nbytes()) for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del kept
    held = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return most


def ratio(times: dict[str, list[Any]], one: str, other: str, part: int) -> float:
    return statistics.median(a[part] / b[part] for a, b in zip(times[one], times[other], strict=True))


def cpu_table(result: dict[str, Any]) -> str:
    lines = [
        "Routing: torch twin beside torch by hand (topk, gather, bincount, sort); ratio below 1: the twin takes less",
        f"{'tokens':>7}{'experts':>9}{'k':>4}{'twin, ms cpu':>14}{'cpu time':>10}{'wall time':>11}{'peak memory':>13}",
    ]
    for row in result["routing"]:
        seconds, peaks = row["seconds"], row["peak"]
        lines.append(
            f"{row['tokens']:>7}{row['experts']:>9}{row['k']:>4}{1e3 * _median(seconds['twin'], 1):>14.1f}"
            f"{ratio(seconds, 'twin', 'by hand', 1):>10.2f}{ratio(seconds, 'twin', 'by hand', 0):>11.2f}"
            f"{peaks['twin'] / peaks['by hand']:>13.2f}"
        )
    row = result["quantile"]
    lines += [
        "",
        f"Exact quantile of one rank, {row['tokens']} tokens, {row['experts']} experts: bf16 margins to one number each",
        f"{'':<32}{'ms cpu':>8}{'ours / this, cpu':>18}{'wall':>7}{'peak, MiB':>11}",
    ]
    for name in row["seconds"]:
        against = [ratio(row["seconds"], "ours", name, part) for part in (1, 0)]
        lines.append(
            f"{name:<32}{1e3 * _median(row['seconds'][name], 1):>8.1f}{against[0]:>18.2f}{against[1]:>7.2f}"
            f"{row['peak'][name] / 2**20:>11.0f}"
        )
    lines.append(
        f"torch {result['torch']}, {result['threads']} thread(s), load {result['load']:.1f} on {os.cpu_count()} cores at the "
        f"start; medians of {result['turns']} turns"
    )
    return "\n".join(lines)


def _median(pairs: list[tuple[float, float]], part: int) -> float:
    return statistics.median(pair[part] for pair in pairs)


def on_gpu(turns: int) -> dict[str, Any]:
    copied = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    bandwidth = 2 * copied.numel() / statistics.median(gpu_seconds(lambda: target.copy_(copied)) for _ in range(turns))
    rows, races = [], []
    for experts in GPU_EXPERTS:
        for name, (unavoidable, calls) in gpu_calls(experts).items():
            times: dict[str, list[tuple[float]]] = {contestant: [] for contestant in calls}
            for _ in range(turns):
                for contestant, call in calls.items():
                    times[contestant].append((gpu_seconds(call),))
            rows.append({"kernel": name, "experts": experts, "bytes": unavoidable, "seconds": times})
            if not same_bits(calls["triton"]):
                races.append(f"{name}, {experts} experts")
            print(f"{name}, {experts} experts", file=sys.stderr, flush=True)
    return {"tokens": GPU_TOKENS, "copy_bytes_per_second": bandwidth, "kernels": rows, "races": races}


def gpu_calls(experts: int, k: int = 8) -> dict[str, tuple[int, dict[str, Call]]]:
    """{kernel: (bytes that cannot be avoided, {contestant: call})}."""
    with torch.device("cuda"):
        logits_TE, bias_E = torch.randn(GPU_TOKENS, experts), torch.randn(experts)
        x_TD = torch.randn(GPU_TOKENS, WIDTH, dtype=torch.bfloat16)
    leaf_TE = logits_TE.clone().requires_grad_()

    def route(module: Any) -> Call:
        return lambda: module.route_rows(logits_TE, k, bias=bias_E, **OPTIONS)

    def route_and_back(function: Callable[..., Any]) -> Call:
        return lambda: torch.autograd.grad(function(leaf_TE, k, bias=bias_E, **OPTIONS).weights, leaf_TE, upstream_TK)

    routed = route(ops)()
    upstream_TK = torch.randn_like(routed.weights)
    margin_arguments = routed.selection, routed.cutoff, None, None
    values_TE, high_EB = ops.margin_bytes(*margin_arguments)
    high_E = high_EB.argmax(dim=1)
    slots_N, starts_E1 = ops.expert_order(routed.indices, experts, None)
    rows_RD = ops.take_tokens(x_TD, slots_N, k)
    weights_TK = routed.weights.detach()
    outputs = size(routed.indices, weights_TK, routed.scores, routed.counts, routed.cutoff) + GPU_TOKENS  # a byte: bad row
    compiled = {name: torch.compile(function, dynamic=False) for name, function in _twins().items()}
    return {
        "router": (
            size(logits_TE, bias_E) + outputs,
            {
                "triton": route(ops),
                "twin": route(router),
                "compiled twin": lambda: compiled["route_rows"](logits_TE, k, bias=bias_E, **OPTIONS),
            },
        ),
        "router, forward and backward": (
            # The backward reads scores, indices and the weights' gradient, and writes the logits' gradient.
            size(logits_TE, bias_E) + outputs + size(routed.scores, routed.indices, upstream_TK, logits_TE),
            {
                "triton": route_and_back(ops.route_rows),
                "twin": route_and_back(router.route_rows),
                "compiled twin": route_and_back(compiled["route_rows"]),
            },
        ),
        "margins and high bytes": (
            size(*margin_arguments[:2], values_TE, high_EB),
            {
                "triton": lambda: ops.margin_bytes(*margin_arguments),
                "twin": lambda: margin.bf16_margins(*margin_arguments),
                "compiled twin": lambda: compiled["bf16_margins"](*margin_arguments),
            },
        ),
        "low bytes": (
            size(values_TE, high_EB),
            {
                "triton": lambda: ops.byte_histogram(values_TE, high_E),
                "twin": lambda: radix.low_byte_histogram(values_TE, high_E),
                "compiled twin": lambda: compiled["low_byte_histogram"](values_TE, high_E),
            },
        ),
        "expert order": (
            size(routed.indices, slots_N, starts_E1),
            {
                "triton": lambda: ops.expert_order(routed.indices, experts, None),
                "twin": lambda: permutation.expert_order(routed.indices, experts),
                "compiled twin": lambda: compiled["expert_order"](routed.indices, experts),
            },
        ),
        "permute": (
            size(x_TD, slots_N, rows_RD),
            {
                "triton": lambda: ops.take_tokens(x_TD, slots_N, k),
                "twin": lambda: permutation.permute(x_TD, slots_N, k),
                "compiled twin": lambda: compiled["permute"](x_TD, slots_N, k),
            },
        ),
        "unpermute": (
            size(rows_RD, slots_N, weights_TK, x_TD),
            {
                "triton": lambda: ops.sum_slots(rows_RD, slots_N, weights_TK, GPU_TOKENS, k),
                "twin": lambda: permutation.unpermute(rows_RD, weights_TK, slots_N),
                "compiled twin": lambda: compiled["unpermute"](rows_RD, weights_TK, slots_N),
            },
        ),
    }


def _twins() -> dict[str, Callable[..., Any]]:
    functions = (
        router.route_rows,
        margin.bf16_margins,
        radix.low_byte_histogram,
        permutation.expert_order,
        permutation.permute,
        permutation.unpermute,
    )
    return {function.__name__: function for function in functions}


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gpu_seconds(call: Call) -> float:
    from triton.testing import do_bench  # empties the L2 cache before each call

    return float(do_bench(call, warmup=10, rep=50, return_mode="median")) / 1e3


def same_bits(call: Call) -> bool:
    def bits() -> list[Tensor]:
        found = call()
        tensors = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
        return [each.detach().contiguous().view(torch.uint8) for each in tensors if each.dim()]

    first = bits()
    return all(all(torch.equal(one, other) for one, other in zip(first, bits(), strict=True)) for _ in range(REPEATS - 1))


def gpu_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['card']}, torch {result['torch']}, {result['tokens']} tokens, k = 8; a copy moves "
        f"{result['copy_bytes_per_second'] / 1e9:.0f} GB/s",
        f"{'kernel':<30}{'experts':>8}{'triton, us':>12}{'share of copy':>15}{'twin / triton':>15}{'compiled / triton':>19}",
    ]
    for row in result["kernels"]:
        seconds = statistics.median(each[0] for each in row["seconds"]["triton"])
        share = row["bytes"] / seconds / result["copy_bytes_per_second"]
        lines.append(
            f"{row['kernel']:<30}{row['experts']:>8}{1e6 * seconds:>12.1f}{share:>15.0%}"
            f"{ratio(row['seconds'], 'twin', 'triton', 0):>15.2f}{ratio(row['seconds'], 'compiled twin', 'triton', 0):>19.2f}"
        )
    verdict = f"differ between runs: {', '.join(result['races'])}" if result["races"] else "are the same every time"
    lines.append(f"Each kernel ran {REPEATS} times on the same input; its bits {verdict}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
