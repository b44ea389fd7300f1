"""A Mixtral-shaped transformers model, randomly initialised, trained on real text with its stock loss and with our balancers.

    python benchmarks/hf_finetune.py                     # 10 minutes on one idle core; needs evenload[hf,train]
    python benchmarks/hf_finetune.py --seeds 0 --steps 100

Same seed, same data, same order. 8 experts, top-2, 4 layers, on the code and prose of the standard library; each microbatch
comes from one of the two, a quarter of the sequences are padded. "stock" is transformers' auxiliary loss with the coefficient
of MixtralConfig (0.001) and with that of Mixtral-8x7B (0.02); it is one loss on the sums over all layers, so that layers may
be uneven in opposite ways. "gshard" is the same loss per layer. MaxVio is averaged over layers and over the steps after the
first 75; the validation loss is on held-out text, in nats per token, without any auxiliary loss.
"""

import argparse
import json
import pydoc_data.topics
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import evenload
from evenload.models.hf import balance
from evenload.train.tokenizer import train_tokenizer

RESULTS = Path(__file__).parent / "results"
VOCAB, LENGTH, ROWS, MICROBATCHES, BURN_IN = 2048, 128, 4, 4, 75
METHODS: dict[str, dict[str, Any]] = {
    "no balancing": {"balancers": "none"},
    "stock loss 0.001": {"balancers": "none", "aux": 0.001},
    "stock loss 0.02": {"balancers": "none", "aux": 0.02},
    "gshard 0.02": {"balancers": [{"name": "gshard", "coeff": 0.02}]},
    "eqb+lei": {"balancers": "eqb+lei"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS / "hf_finetune.json")
    arguments = parser.parse_args()
    if arguments.steps <= BURN_IN:
        sys.exit(f"--steps {arguments.steps}: the first {BURN_IN} steps are left out of the averages; use more")
    torch.set_num_threads(1)
    training, validation = domains()
    rows = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            row = {"method": method, "seed": seed, **train(METHODS[method], seed, arguments.steps, training, validation)}
            rows.append(row)
            print({key: value for key, value in row.items() if key != "curve"}, file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {**versions, "steps": arguments.steps, "seeds": arguments.seeds, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result) + "\n")
    arguments.out.with_suffix(".txt").write_text(table(result))
    print(table(result), end="")


def domains() -> tuple[list[Tensor], list[Tensor]]:
    """Token sequences (N, LENGTH) of code and of prose, to train on and held out (every tenth document)."""
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(argparse.__file__).parent.glob("*.py"))]
    prose = list(pydoc_data.topics.topics.values())
    tokenizer = train_tokenizer(iter(code[:40] + prose), VOCAB)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for documents in (code, prose):
        for part, held_out in zip(parts, (False, True), strict=True):
            texts = [text for i, text in enumerate(documents) if (i % 10 == 9) == held_out]
            tokens = torch.tensor([id for ids in tokenizer.encode(texts) for id in ids])
            part.append(tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH))
    return parts


def train(method: dict[str, Any], seed: int, steps: int, training: list[Tensor], validation: list[Tensor]) -> dict[str, Any]:
    torch.manual_seed(seed)
    aux = method.get("aux")
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=aux is not None,
        router_aux_loss_coef=aux or 0.0,
    )
    model = balance(MixtralForCausalLM(config), method["balancers"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    choose = random.Random(seed)
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        total = 0.0
        for microbatch in range(MICROBATCHES):
            source = training[microbatch % len(training)]
            tokens = source[torch.tensor([choose.randrange(len(source)) for _ in range(ROWS)])]
            mask = torch.ones_like(tokens)
            mask[0, LENGTH // 2 :] = 0
            output = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
            (output.loss / MICROBATCHES).backward()
            extra = 0.0 if output.aux_loss is None else aux * float(output.aux_loss.detach())
            total += (float(output.loss.detach()) - extra) / MICROBATCHES
        report = evenload.balance_step(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        layers = {name: float(report.layers[name].mean()) for name in ("maxvio", "maxvio_local", "floor", "floor_local")}
        curve.append({name: round(value, 4) for name, value in {"loss": total, **layers}.items()})
    seconds = time.perf_counter() - began
    late = {name: statistics.mean(point[name] for point in curve[BURN_IN:]) for name in curve[0]}
    losses = [evaluate(model, tokens) for tokens in validation]
    return {"validation_loss": statistics.mean(losses), "seconds": seconds, **late, "curve": curve}


@torch.no_grad()
def evaluate(model: MixtralForCausalLM, tokens: Tensor, rows: int = 128) -> float:
    """Mean loss on the first `rows` held-out sequences of one domain."""
    model.eval()
    batches = tokens[:rows].split(16)
    losses = [float(model(input_ids=batch, labels=batch, output_router_logits=False).loss) for batch in batches]
    model.train()
    return statistics.mean(losses)


def table(result: dict[str, Any]) -> str:
    columns = {"training loss": "loss", "validation loss": "validation_loss"}
    columns |= {"global MaxVio": "maxvio", "local MaxVio": "maxvio_local"}
    lines = [f"{'method':<18}" + "".join(f"{title:>18}" for title in columns)]
    methods = dict.fromkeys(row["method"] for row in result["rows"])
    for method in methods:
        rows = [row for row in result["rows"] if row["method"] == method]
        lines.append(f"{method:<18}" + "".join(_cell([row[name] for row in rows]) for name in columns.values()))
    floors = [statistics.mean(row[name] for row in result["rows"]) for name in ("floor", "floor_local")]
    lines.append(f"{'(random routing)':<18}{'':>36}" + "".join(f"{floor:>18.3f}" for floor in floors))
    lines.append(
        f"mean over seeds {result['seeds']} (and their spread); steps {BURN_IN} to {result['steps']}; "
        f"torch {result['torch']}, transformers {result['transformers']}"
    )
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.3f} +-{spread:.3f}".rjust(18)


if __name__ == "__main__":
    main()
