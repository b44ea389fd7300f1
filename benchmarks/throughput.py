"""One training step of ours beside Hugging Face's Qwen3-MoE of the same shape and weights, and beside a dense model.

    python benchmarks/throughput.py                     # three shapes, one thread, table and results/throughput.json
    python benchmarks/throughput.py --shapes narrow --threads 2 --turns 40

Qwen3-MoE is the peer because it is the same function: grouped queries with QK-norm and rotary positions, softmax top-k
with normalised weights, SwiGLU experts, tied embeddings. Weights are copied across, and loss and gradients compared, before
anything is timed. A step is forward, backward, fused AdamW over all parameters in one group; ours includes `balance_step`.
The peer runs without what ours does not have: no cache, SDPA attention. Its expert implementations are all tried, and the
fastest is what ours is measured against: bare, as `none` is, and with its own auxiliary loss, as it would be trained. The
process has the allocator settings of `evenload train`, for both alike. Ours computes the loss in chunks, the peer on all
logits: that is part of the step.

The contestants take turns, and a ratio is formed within a turn, so a busy machine slows both. "cpu" is the process's own time,
which does not count what other programs took. The dense model has feed-forwards of width top_k * expert_hidden: equal
active FLOPs but for the gate. "common" is the share of a step in matrix products, attention kernel and optimizer, which are the
same library calls on both sides: 1 / common bounds what anything else can gain.

On a GPU the peer holds bfloat16 weights, its fastest way, and ours are float32 under bfloat16 autocast, as in training.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from evenload.balancers import balance_step, routers
from evenload.models import GPT, GPTConfig
from evenload.train.runtime import choose_device, tune_allocator

RESULTS = Path(__file__).parent / "results"
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SCREENING_TURNS = 3
PROFILED_STEPS = 5
COPIED_WEIGHTS_LIMIT = 6 << 30  # bytes: batched_mm copies the weights of its experts to every token
COMMON = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_fused_adamw_")
Step = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    """Model and batch; widths in elements, `batch` sequences of `seq_len` tokens."""

    d_model: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    hidden: int
    vocab: int
    batch: int
    seq_len: int
    layers: int = 4

    def ours(self, **options: Any) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocab,
            d_model=self.d_model,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            num_experts=self.experts,
            top_k=self.top_k,
            expert_hidden=self.hidden,
            score="softmax",
            normalize_weights=True,
            **options,
        )

    def peer(self) -> Qwen3MoeConfig:
        mine = self.ours()
        return Qwen3MoeConfig(
            vocab_size=self.vocab,
            hidden_size=self.d_model,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=mine.head_width,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.hidden,
            norm_topk_prob=True,
            rms_norm_eps=mine.norm_eps,
            rope_theta=mine.rope_theta,
            max_position_embeddings=mine.max_seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            output_router_logits=False,
            attn_implementation="sdpa",
        )

    def copied_weights(self) -> int:
        """Bytes of expert weights that batched_mm keeps for the backward."""
        return 4 * self.layers * self.batch * self.seq_len * self.top_k * 3 * self.hidden * self.d_model


SHAPES = {
    "narrow": Shape(d_model=128, heads=4, kv_heads=2, experts=16, top_k=2, hidden=256, vocab=4096, batch=4, seq_len=256),
    "medium": Shape(d_model=256, heads=8, kv_heads=2, experts=32, top_k=4, hidden=256, vocab=8192, batch=4, seq_len=256),
    "wide": Shape(d_model=512, heads=8, kv_heads=2, experts=64, top_k=8, hidden=256, vocab=8192, batch=2, seq_len=512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "throughput.json")
    arguments = parser.parse_args()
    if arguments.turns < 4:
        sys.exit(f"--turns {arguments.turns}: quartiles need at least 4")
    tune_allocator()
    torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    result: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "threads": arguments.threads}
    result["shapes"] = {name: measure(name, SHAPES[name], arguments.turns, device) for name in arguments.shapes}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def measure(name: str, shape: Shape, turns: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq_len), device=device)
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    ours = {balancers: GPT(shape.ours(balancers=balancers)).to(device).train() for balancers in ("none", "eqb+lei")}
    ours["eqb+lei"].load_state_dict(ours["none"].state_dict(), strict=False)
    dense = GPT(shape.ours(num_dense_layers=shape.layers)).to(device).train()
    peer = Qwen3MoeForCausalLM(shape.peer()).to(device).train()
    with torch.no_grad():
        for mine, rows, theirs in correspondence(ours["none"], peer):
            theirs.copy_(mine[rows])

    fits = shape.copied_weights() <= COPIED_WEIGHTS_LIMIT
    implementations = [each for each in IMPLEMENTATIONS if fits or each != "batched_mm"]
    # A GPU's grouped products want bfloat16: there, the comparison in float32 is with the implementation that has none.
    differences = {
        each: difference(ours["none"], peer, each, tokens, targets)
        for each in implementations
        if device.type == "cpu" or each == "eager"
    }
    if device.type == "cuda":
        peer = peer.to(torch.bfloat16)

    their_optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
    peers = {f"HF {each}": their_step(peer, their_optimizer, each, tokens) for each in implementations}
    screened = take_turns(name, peers, SCREENING_TURNS, device)
    fastest = min(screened, key=lambda each: statistics.median(cpu for _, cpu in screened[each]))
    if device.type == "cuda":
        fastest = min(screened, key=lambda each: statistics.median(wall for wall, _ in screened[each]))

    contestants = {fastest: peers[fastest]}
    contestants[with_loss(fastest)] = their_step(peer, their_optimizer, fastest.removeprefix("HF "), tokens, balanced=True)
    contestants |= {f"ours {balancers}": our_step(model, tokens, targets) for balancers, model in ours.items()}
    contestants["ours dense"] = our_step(dense, tokens, targets)
    times = take_turns(name, contestants, turns, device)
    return {
        "shape": vars(shape),
        "differences": differences,
        "screening": {each: _medians(pairs) for each, pairs in screened.items()},
        "not_run": {} if fits else {"HF batched_mm": f"would copy {shape.copied_weights() / 2**30:.0f} GiB of weights"},
        "fastest": fastest,
        "common": {each: common_share(contestants[each], device) for each in contestants},
        "times": times,
    }


def correspondence(model: GPT, peer: nn.Module) -> Iterator[tuple[nn.Parameter, slice, nn.Parameter]]:
    """(our parameter, which of its rows, the peer's parameter) for every parameter of the peer."""
    everything = slice(None)
    yield model.embedding, everything, peer.model.embed_tokens.weight
    yield model.final_norm.weight, everything, peer.model.norm.weight
    for block, layer in zip(model.blocks, peer.model.layers, strict=True):
        mine, theirs = block.attention, layer.self_attn
        start = 0
        for part, heads in zip((theirs.q_proj, theirs.k_proj, theirs.v_proj), mine.heads, strict=True):
            end = start + heads * mine.head_width
            yield mine.qkv.weight, slice(start, end), part.weight
            start = end
        yield mine.out.weight, everything, theirs.o_proj.weight
        yield mine.q_norm.weight, everything, theirs.q_norm.weight
        yield mine.k_norm.weight, everything, theirs.k_norm.weight
        yield block.attention_norm.weight, everything, layer.input_layernorm.weight
        yield block.ffn_norm.weight, everything, layer.post_attention_layernorm.weight
        yield block.ffn.router.weight, everything, layer.mlp.gate.weight
        yield block.ffn.experts.w_gate_up, everything, layer.mlp.experts.gate_up_proj
        yield block.ffn.experts.w_down, everything, layer.mlp.experts.down_proj


def difference(model: GPT, peer: nn.Module, implementation: str, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """How far apart loss and gradients are; raises ValueError where the two are not the same function.

    The gradients' difference is the largest over parameters of max|a - b| / max|b|.
    """
    peer.set_experts_implementation(implementation)
    mine, theirs = model(tokens, targets).loss, peer(input_ids=tokens, labels=tokens).loss
    mine.backward()
    theirs.backward()
    balance_step(model)
    pairs = [(a.grad[rows], b.grad) for a, rows, b in correspondence(model, peer)]
    compared = sum(b.numel() for _, b in pairs)
    if compared != sum(parameter.numel() for parameter in peer.parameters()):
        raise ValueError(f"{compared} of the peer's parameters have a counterpart; all of them must")
    gradients = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    loss = abs(float(mine.detach() - theirs.detach()))
    model.zero_grad()
    peer.zero_grad()
    if loss > 1e-4 or gradients > 1e-3:
        raise ValueError(f"{implementation}: losses differ by {loss:.1e}, gradients by {gradients:.1e}; not the same model")
    return {"loss": loss, "gradients": gradients}


def our_step(model: GPT, tokens: Tensor, targets: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    routed = bool(routers(model))
    on_gpu = tokens.device.type == "cuda"

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else contextlib.nullcontext():
            loss = model(tokens, targets).loss
        loss.backward()
        if routed:
            balance_step(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def their_step(
    peer: nn.Module, optimizer: torch.optim.Optimizer, implementation: str, tokens: Tensor, *, balanced: bool = False
) -> Step:
    def step() -> float:
        peer.set_experts_implementation(implementation)  # the contestants share one peer
        loss = peer(input_ids=tokens, labels=tokens, output_router_logits=balanced).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def with_loss(peer: str) -> str:
    return f"{peer}, aux loss"


def take_turns(name: str, steps: dict[str, Step], turns: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """(wall, cpu) seconds of every step in every turn, after a turn that warms up. Each turn starts with another one."""
    order, times = list(steps), {each: [] for each in steps}
    for turn in range(turns + 1):
        order = order[1:] + order[:1]
        for each in order:
            took = timed(steps[each], device)
            if turn:
                times[each].append(took)
        print(f"{name}: turn {turn}/{turns} of {', '.join(steps)}", file=sys.stderr, flush=True)
    return times


def timed(step: Step, device: torch.device) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    if device.type == "cpu":
        step()
        return time.perf_counter() - wall, time.process_time() - cpu
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000, time.process_time() - cpu


def common_share(step: Step, device: torch.device) -> float:
    """Share of a step's operator time in what both sides take from the same libraries; median over a few steps."""
    on_gpu = device.type == "cuda"
    shares = []
    for _ in range(PROFILED_STEPS):
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
            step()
        of: dict[str, float] = {
            row.key: row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in profiled.key_averages()
        }
        common = sum(t for key, t in of.items() if key in COMMON or key.startswith("aten::_scaled_dot_product"))
        shares.append(common / sum(of.values()))
    return statistics.median(shares)


def table(result: dict[str, Any]) -> str:
    titles = ("ms wall", "ms cpu", "tokens/s", "speed by wall (quartiles)", "speed by cpu (quartiles)", "common")
    widths = (10, 10, 11, 28, 28, 9)
    lines = [f"torch {result['torch']}, {result['device']}, {result['threads']} thread(s)"]
    for name, found in result["shapes"].items():
        shape, reference = found["shape"], found["times"][found["fastest"]]
        lines += ["", f"{name}: " + ", ".join(f"{key} {value}" for key, value in shape.items())]
        for each, apart in found["differences"].items():
            lines.append(f"  same function as HF {each}: loss within {apart['loss']:.1e}, gradients {apart['gradients']:.1e}")
        tried = [f"{each} {wall * 1e3:.0f} ({cpu * 1e3:.0f})" for each, (wall, cpu) in found["screening"].items()]
        tried += [f"{each} {why}" for each, why in found["not_run"].items()]
        lines.append(f"  expert implementations, ms wall (cpu): {', '.join(tried)}")
        lines.append("  " + f"{'':<26}" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
        for each, times in found["times"].items():
            wall, cpu = _medians(times)
            cells = [f"{wall * 1e3:.1f}", f"{cpu * 1e3:.1f}", f"{shape['batch'] * shape['seq_len'] / wall:,.0f}"]
            cells += [_ratio([a[i] / b[i] for a, b in zip(reference, times, strict=True)]) for i in (0, 1)]
            cells.append(f"{found['common'][each]:.0%}")
            lines.append("  " + f"{each:<26}" + "".join(f"{c:>{width}}" for c, width in zip(cells, widths, strict=True)))
        balanced = with_loss(found["fastest"])
        beside = [a[0] / b[0] for a, b in zip(found["times"][balanced], found["times"]["ours eqb+lei"], strict=True)]
        lines.append(f"  ours eqb+lei beside {balanced}, by wall: {_ratio(beside)}")
        bound = 1 / found["common"][found["fastest"]]
        lines.append(f"  at most {bound:.2f}x of {found['fastest']} is possible with everything outside 'common' for free")
    lines += ["", "speed: time of the fastest HF divided by this row's, median over turns of the ratio within a turn"]
    return "\n".join(lines)


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _ratio(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f}x ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
