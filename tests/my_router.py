"""Routers such as a user might have, for `evenload check my_router:...`."""

import torch
from torch import nn

from evenload import Balancer, Router


class TopKRouter(nn.Module):
    """Softmax, top-k, nothing else: weights before indices, no mask."""

    def __init__(self, hidden_size, n_experts, k, bias=False):
        super().__init__()
        self.proj = nn.Linear(hidden_size, n_experts, bias=bias)
        self.k = k

    def forward(self, x):
        logits = self.proj(x)
        weights, indices = logits.softmax(-1).topk(self.k)
        return weights, indices, logits


class BiasRouter(nn.Module):
    """Sigmoid scores and a bias that balance_step moves; counts its tokens."""

    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.top_k = top_k
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64))

    def forward(self, x, mask=None):
        scores = self.gate(x).sigmoid()
        indices = (scores + self.expert_bias).topk(self.top_k).indices
        self.load += torch.bincount(indices.flatten(), minlength=len(self.load))
        return indices, scores.gather(1, indices)

    def balance_step(self):
        self.expert_bias += 0.01 * torch.sign(self.load.float().mean() - self.load)
        self.load.zero_()


class OwnBias(Balancer):
    """Loss-free with larger steps."""

    def build(self):
        self.add_state("bias", (self.num_experts,))
        self.add_statistic("counts", (self.num_experts,))

    def selection_bias(self, selection, mask):
        return self.bias

    def observe(self, routing):
        self.counts += routing.counts

    def update(self):
        counts = yield self.counts
        self.bias += 0.05 * torch.sign(counts.sum() - self.num_experts * counts)


class OwnRouter(Router):
    """A subclass of the library's."""


class ConfigRouter(nn.Module):
    def __init__(self, config):
        super().__init__()


class DenseRouter(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)

    def forward(self, x):
        return self.gate(x).softmax(-1)


class HoldsOurs(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.inner = Router(dim, num_experts, top_k, balancers="eqb")

    def forward(self, x):
        return self.inner(x)


SOMETHING = 7
