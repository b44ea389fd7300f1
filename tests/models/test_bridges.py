"""The bridges, each against the installed package where there is one, and against its recorded interface everywhere.

The packages are no dependency: `pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3` (and what it then asks for), and
`pip install --no-deps megatron-core==0.19.0`, let the "installed" halves run on a CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import evenload
from evenload.models.bridges import megatron, torchtitan

D, E, K = 16, 8, 2
PACKAGES = ["recorded", "installed"]


class TokenChoiceTopKRouter(nn.Module):
    """Attributes, arguments and results of torchtitan 0.3's router of that name."""

    def __init__(self, score_func: str, route_norm: bool, route_scale: float) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.num_experts, self.top_k = E, K
        self.num_expert_groups = self.num_limited_groups = None
        self.score_func, self.route_norm, self.route_scale = score_func, route_norm, route_scale

    def forward(self, x, expert_bias=None):
        logits = self.gate(x)
        scores = logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)
        weights, chosen = scores.topk(self.top_k, sorted=False)
        if self.route_norm:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.route_scale, chosen, scores


class TopKRouter(nn.Module):
    """Attributes, arguments and results of megatron-core 0.19's router of that name."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.topk, self.score_function = config, K, config.moe_router_score_function
        self.weight = nn.Parameter(torch.empty(E, D))

    def apply_z_loss(self, logits, padding_mask=None):
        return logits

    def routing(self, logits, padding_mask=None):
        logits = logits.view(-1, E)
        if self.score_function == "sigmoid":
            weights, chosen = logits.sigmoid().topk(K)
            weights = weights / weights.sum(-1, keepdim=True)
        elif self.config.moe_router_pre_softmax:
            weights, chosen = logits.softmax(-1).topk(K)
        else:
            weights, chosen = logits.topk(K)
            weights = weights.softmax(-1)
        weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def forward(self, x, padding_mask=None):
        return self.routing(x @ self.weight.t(), padding_mask=padding_mask)


def titan_router(package: str, score: str, norm: bool, scale: float) -> nn.Module:
    if package == "recorded":
        router: nn.Module = TokenChoiceTopKRouter(score, norm, scale)
    else:
        moe = pytest.importorskip("torchtitan.models.common.moe")
        linear = pytest.importorskip("torchtitan.models.common.linear")
        gate = linear.Linear.Config(in_features=D, out_features=E, bias=False)
        options = {"score_func": score, "route_norm": norm, "route_scale": scale}
        router = moe.TokenChoiceTopKRouter.Config(num_experts=E, top_k=K, gate=gate, **options).build()
    nn.init.normal_(router.gate.weight)
    return nn.ModuleDict({"router": router})


@pytest.fixture
def mega_router(monkeypatch):
    def build(package: str, **options) -> nn.Module:
        defaults = {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_topk_scaling_factor": None,
            "moe_router_load_balancing_type": "none",
            "moe_router_enable_expert_bias": False,
        }
        chosen = defaults | options
        if package == "recorded":
            rest = {"num_moe_experts": E, "moe_router_num_groups": None, "moe_router_group_topk": None}
            router: nn.Module = TopKRouter(SimpleNamespace(**rest, **chosen))
        else:
            module = pytest.importorskip("megatron.core.transformer.moe.router")
            from megatron.core.transformer import TransformerConfig

            config = TransformerConfig(
                num_layers=1, hidden_size=D, num_attention_heads=1, num_moe_experts=E, moe_router_topk=K, add_bias_linear=False,
                moe_aux_loss_coeff=0.0, **chosen,
            )  # fmt: skip
            # Megatron moves the gate to "the current device"; here that is the CPU.
            monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
            groups = SimpleNamespace(tp=None, cp=None, tp_cp=SimpleNamespace(size=lambda: 1), tp_dp_cp=None)
            router = module.TopKRouter(config, pg_collection=groups)
        nn.init.normal_(router.weight)
        return nn.ModuleDict({"router": router})

    return build


def skewed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) + 1


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("score", "norm", "scale"), [("sigmoid", False, 1.0), ("sigmoid", True, 2.5), ("softmax", True, 1.0)])
def test_torchtitan_weights_are_its_own_and_loads_become_even(package, score, norm, scale):
    model = titan_router(package, score, norm, scale)
    x = skewed(4, 64, D)
    weights, chosen, scores = model["router"](x)
    assert torchtitan.balance(model, "eqb+lei") is model
    ours = model["router"](x)
    assert torch.equal(ours[1].sort(-1).values, chosen.sort(-1).values)
    torch.testing.assert_close(ours[0].sort(-1).values, weights.sort(-1).values)
    assert torch.equal(ours[2], scores)
    ours[0].sum().backward()
    first = evenload.balance_step(model)
    assert int(first.counts[0].sum()) == 4 * 64 * K
    model["router"](x)
    assert evenload.balance_step(model).layers["maxvio"][0] < 0.3 < first.layers["maxvio"][0]


@pytest.mark.parametrize("package", PACKAGES)
def test_torchtitan_with_none_is_untouched(package):
    model = titan_router(package, "sigmoid", True, 1.0)
    x = skewed(2, 8, D)
    before = model["router"](x)
    torchtitan.balance(model, "none")
    assert all(torch.equal(one, other) for one, other in zip(before, model["router"](x), strict=True))
    with pytest.raises(ValueError, match="balanced already"):
        torchtitan.balance(model)


def test_torchtitan_refuses_two_biases_and_other_models():
    model = titan_router("recorded", "sigmoid", True, 1.0)
    model["router"].register_buffer("expert_bias_E", torch.zeros(E))
    with pytest.raises(ValueError, match=r"load_balance_coeff=None"):
        torchtitan.balance(model)
    with pytest.raises(ValueError, match="no TokenChoiceTopKRouter in this Linear"):
        torchtitan.balance(nn.Linear(1, 1))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "softmax"},
        {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
    ],
)
def test_megatron_weights_are_its_own_and_loads_become_even(package, options, mega_router):
    model = mega_router(package, **options)
    x = skewed(64, 4, D)
    probs, chosen = model["router"](x)
    assert megatron.balance(model, "eqb+lei") is model
    ours = model["router"](x)
    assert torch.equal(ours[1], chosen)
    torch.testing.assert_close(ours[0], probs)
    first = evenload.balance_step(model)
    model["router"](x)
    assert evenload.balance_step(model).layers["maxvio"][0] < 0.3 < first.layers["maxvio"][0]


@pytest.mark.parametrize("package", PACKAGES)
def test_megatron_padding_counts_nowhere_and_rows_are_sequences(package, mega_router):
    """Its mask is True on padding, and its tokens run along the sequence first."""
    model = mega_router(package)
    megatron.balance(model, [{"name": "gshard", "scope": "sequence"}])
    x = skewed(6, 2, D)
    padding = torch.zeros(6, 2, dtype=torch.bool)
    padding[4:, 1] = True
    probs, _ = model["router"](x, padding)
    assert torch.equal(probs.view(6, 2, E).sum(-1) == 0, padding)
    padded = evenload.balance_step(model)
    assert int(padded.counts[0].sum()) == 10 * K
    losses = []
    for part in (x[:, :1], x[:4, 1:]):
        model["router"](part)
        losses.append(evenload.balance_step(model).losses["gshard"])
    torch.testing.assert_close(padded.losses["gshard"], (6 * losses[0] + 4 * losses[1]) / 10)


def test_megatron_injection_follows_its_scale_of_auxiliary_losses(mega_router, monkeypatch):
    """With the installed package, or with a module that stands for it."""
    import sys

    scaler = SimpleNamespace(main_loss_backward_scale=torch.tensor(3.0))
    utils = SimpleNamespace(MoEAuxLossAutoScaler=scaler)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.moe_utils", utils)
    x = skewed(16, 2, D)
    grads = []
    for scale in (0.0, 1.0, 3.0):
        scaler.main_loss_backward_scale = torch.tensor(scale)
        torch.manual_seed(1)
        model = mega_router("recorded")
        megatron.balance(model, [{"name": "lei", "coeff": 10.0}])
        model["router"](x)[0].square().sum().backward()
        grads.append(model["router"].weight.grad)
    torch.testing.assert_close(grads[2] - grads[0], 3 * (grads[1] - grads[0]), rtol=1e-4, atol=1e-5)
    assert (grads[1] - grads[0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_router_load_balancing_type": "aux_loss"}, "moe_router_load_balancing_type='aux_loss'.*needs 'none'"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias=True.*needs False"),
        ({"moe_expert_capacity_factor": 1.0}, r"moe_expert_capacity_factor=1\.0.*needs None"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function='sqrtsoftplus'"),
    ],
)
def test_megatron_options_that_do_not_go_with_ours_are_refused(options, message, mega_router):
    model = mega_router("recorded", **options)
    with pytest.raises(ValueError, match=message):
        megatron.balance(model)
    assert not evenload.routers(model)


def test_groups_that_megatron_ranks_otherwise_are_refused(mega_router) -> None:
    model = mega_router("recorded")
    (router,) = (module for module in model.modules() if isinstance(module, TopKRouter))
    router.config.moe_router_num_groups, router.config.moe_router_group_topk = 4, K
    with pytest.raises(ValueError, match=f"moe_router_topk={K} with moe_router_group_topk={K}: Megatron ranks groups"):
        megatron.balance(model, "eqb")
