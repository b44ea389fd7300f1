"""A balancing idea of your own: one class in your own file, compared with those that are there.

The idea here: like loss-free balancing, but an expert's bias moves by its load error in logarithms and not by its sign alone,
so that it takes large steps far from balance and small ones close to it.

    python examples/your_own_balancer.py
"""

import argparse

import torch

from evenload import Balancer, Router, balance_step


class LogError(Balancer):
    """bias_e -= rate * log(load of e / fair load), once per optimizer step."""

    name, space = "log_error", "logits"

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.rate = rate

    def build(self):
        self.add_state("bias", (self.num_experts,))  # in the state dict
        self.add_statistic("counts", (self.num_experts,))  # starts anew after every step

    def selection_bias(self, selection, mask):
        return self.bias

    def observe(self, routing):
        self.counts += routing.counts

    def update(self):
        counts = yield self.counts  # this rank's sum goes out, that of all ranks comes back
        fair = counts.sum() / self.num_experts
        if fair > 0:
            self.bias -= self.rate * torch.log(counts.clamp(min=1) / fair)

    def report(self):
        return {"bias_span": self.bias.max() - self.bias.min()}


def main(steps: int) -> None:
    print(f"{'step':>4}" + "".join(f"{name:>12}" for name in ("log_error", "loss_free", "eqb")) + "   MaxVio")
    routers = [Router(None, 32, 4, balancers=balancer) for balancer in (LogError(), "loss_free", "eqb")]
    torch.manual_seed(0)
    popularity = torch.randn(32)
    for step in range(steps):
        logits = popularity + torch.randn(4096, 32)
        for router in routers:
            router(logits)
        maxvio = [float(balance_step(router).layers["maxvio"]) for router in routers]
        print(f"{step:4d}" + "".join(f"{value:12.3f}" for value in maxvio))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    main(parser.parse_args().steps)
