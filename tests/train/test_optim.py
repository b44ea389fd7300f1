import itertools
import math

import pytest
import torch

from evenload.models import GPT, GPTConfig
from evenload.train import learning_rate
from evenload.train.config import OptimConfig, ScheduleConfig
from evenload.train.optim import clip_gradients, decay_groups, gradient_norm, make_optimizer, router_gradient_norm

CONFIG = {
    "vocab_size": 32,
    "d_model": 8,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_experts": 4,
    "expert_hidden": 8,
}


def rates(kind: str, steps: int = 100, **options: float) -> list[float]:
    schedule = ScheduleConfig(kind=kind, **options)  # type: ignore[arg-type]
    return [learning_rate(step, steps, 2.0, schedule) for step in range(steps)]


def test_cosine_rises_peaks_and_ends_at_the_floor() -> None:
    lr = rates("cosine", warmup=9, min_ratio=0.1)
    assert lr[:9] == pytest.approx([2.0 * (i + 1) / 10 for i in range(9)])
    assert lr[9] == 2.0
    assert lr[54] == pytest.approx(0.2 + 1.8 * 0.5)  # halfway between 9 and 99
    assert lr[99] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(lr[9:]))


def test_wsd_is_flat_and_then_linear() -> None:
    lr = rates("wsd", warmup=10, min_ratio=0.0, decay=0.2)
    assert set(lr[10:81]) == {2.0}
    assert lr[99] == 0.0
    drops = [a - b for a, b in itertools.pairwise(lr[80:])]
    assert drops == pytest.approx([2.0 / 19] * 19)


def test_constant_and_very_short_runs() -> None:
    assert set(rates("constant", warmup=0)) == {2.0}
    assert all(0 < rate <= 2.0 for steps in (1, 2, 3) for rate in rates("cosine", steps=steps, warmup=100))


@pytest.mark.parametrize(("tied", "decay_embeddings"), [(True, False), (False, False), (True, True)])
def test_only_matrices_decay(tied: bool, decay_embeddings: bool) -> None:
    model = GPT(GPTConfig(**CONFIG, tie_embeddings=tied))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in decay_groups(model, 0.1, decay_embeddings))
    assert decayed | plain == set(names.values())
    assert not decayed & plain
    assert ("embedding" in decayed) == decay_embeddings
    assert not [name for name in decayed if "norm" in name or "router" in name]
    assert {"blocks.0.ffn.router.weight", "final_norm.weight", "blocks.1.attention_norm.weight"} <= plain
    assert len([name for name in decayed if "experts" in name]) >= 4
    assert ("head.weight" in decayed) == (not tied)


def test_plain_parameters_do_not_shrink() -> None:
    model = GPT(GPTConfig(**CONFIG))
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    assert torch.equal(after["blocks.0.ffn.router.weight"], before["blocks.0.ffn.router.weight"])
    expert = next(name for name in after if "experts" in name)
    torch.testing.assert_close(after[expert], before[expert] * (1 - 0.1 * 0.5))


def test_norms_and_clipping() -> None:
    model = GPT(GPTConfig(**CONFIG))
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 2.0 if "router" in name else 1.0)
    gates = 2 * CONFIG["num_experts"] * CONFIG["d_model"]
    others = sum(parameter.numel() for parameter in model.parameters()) - gates
    norm = gradient_norm(model.parameters())
    assert float(norm) == pytest.approx(math.sqrt(others + 4 * gates))
    assert float(router_gradient_norm(model)) == pytest.approx(math.sqrt(4 * gates))
    clip_gradients(list(model.parameters()), norm, 0.0)
    assert float(gradient_norm(model.parameters())) == float(norm)
    clip_gradients(list(model.parameters()), norm, 1.5)
    assert float(gradient_norm(model.parameters())) == pytest.approx(1.5, rel=1e-4)
    assert float(gradient_norm([])) == 0
