"""A small mixture-of-experts language model in plain PyTorch, as one writes it: a few experts get most of the tokens.

python examples/plain_pytorch_unbalanced.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class MoE(nn.Module):
    def __init__(self, width: int, num_experts: int = 16, top_k: int = 2) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).sigmoid().topk(self.top_k)
        self.load = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(tokens[token] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, token, hidden * weights[token, place, None])
        return output.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mix, self.moe = nn.GRU(width, width, batch_first=True), MoE(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norms[0](x))[0]
        return x + self.moe(self.norms[1](x))


def main(steps: int, width: int = 64) -> None:
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("[a-d]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = nn.Sequential(nn.Embedding(256, width), Block(width), Block(width), nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.stack([data[i : i + 65] for i in torch.randint(len(data) - 65, (16,))])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            loads = [block.moe.load for block in model if isinstance(block, Block)]
            busiest = max(float(load.max() / load.float().mean()) for load in loads)
            print(f"step {step:4d}   loss {loss.item():.3f}   busiest expert: {busiest:.2f} times its fair share")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
