"""What must not matter: how a step's tokens are split, what the experts are called, padding, eval, recomputation, a restart."""

import copy
import itertools

import pytest
import torch
from state import carried
from torch.utils.checkpoint import checkpoint

from evenload import Router, anchor_loss, attach, balance_step, routers

WIDTH, EXPERTS, TOP_K, TOKENS = 12, 8, 2, 48
# Balancers whose whole effect is defined on the step, not on the microbatch.
GLOBAL = ["none", "eqb", "qb_histogram", "loss_free", "phi", "z_loss", [{"name": "phi", "track": "counts"}], "eqb+phi+z_loss"]
EVERY = [
    *GLOBAL,
    "qb",
    "lei",
    "gshard",
    [{"name": "gshard", "scope": "sequence"}],
    [{"name": "gshard", "scope": "global"}],
    "eqb+lei",
    "sinkhorn",
    "uniform",
]


class Model(torch.nn.Module):
    """Two routers, one of them inside a container, behind a linear layer: enough for every gradient to have a way."""

    def __init__(self, balancers):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleDict({"a": Router(WIDTH, EXPERTS, TOP_K, balancers=balancers)})
        self.last = torch.nn.Sequential(Router(WIDTH, EXPERTS, TOP_K, balancers=balancers))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, x, **kw):
        hidden = torch.tanh(self.inner(x))
        first = self.blocks["a"](hidden, **kw).weights.sum(dim=1, keepdim=True)
        second = self.last[0](hidden.reshape(-1, WIDTH) * (1 + first), **kw).weights
        return (second * torch.linspace(0.5, 1, TOP_K)).sum(dim=1)

    def loss(self, x, **kw):
        per_token = self(x, **kw)
        mask = kw.get("mask")
        tokens = max(1, per_token.numel() if mask is None else int(mask.sum()))
        return anchor_loss(per_token.sum() / tokens, self)


def tokens():
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9)) + 0.5


def step(model, parts, group=None, total=None, world=1, scale=1.0):
    """One optimizer step's gradients from microbatches, each weighted by its share of the step's tokens."""
    model.zero_grad()
    total = sum(len(part) for part in parts) if total is None else total
    for part in parts:
        (scale * world * len(part) / total * model.loss(part)).backward()
    report = balance_step(model, group)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in model.parameters()]
    return gradients, [b.clone() for b in persistent(model)], report


def persistent(model):
    return [value for name, value in model.state_dict().items() if "balancers" in name]


def assert_same(found, expected, exact=False):
    tolerance = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-6, "rtol": 1e-5}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("sizes", [[24, 24], [1, 30, 17], [0, 48], [16, 16, 16]], ids=str)
@pytest.mark.parametrize("spec", GLOBAL, ids=str)
def test_one_batch_equals_n_microbatches(spec, sizes):
    gradients, buffers, report = step(Model(spec), [tokens()])
    found, found_buffers, found_report = step(Model(spec), list(tokens().split(sizes)))
    assert_same(found, gradients)
    assert_same(found_buffers, buffers, exact="eqb" in spec and "phi" not in spec)
    for metric in ("maxvio", "minvio", "cv", "entropy", "top10_share", "dead", "lis", "intervention", "floor", "tokens"):
        assert torch.equal(found_report.layers[metric].nan_to_num(7), report.layers[metric].nan_to_num(7)), metric
    if len(set(sizes)) == 1:  # the mean over microbatches is the mean over tokens only when they are equally large
        for name in report.losses:
            torch.testing.assert_close(found_report.losses[name], report.losses[name], rtol=1e-5, atol=1e-7)


def step_on_rank(rank, group, spec, parts_per_rank, world, total):
    gradients, buffers, report = step(Model(spec), parts_per_rank[rank], group, total, world)
    return gradients, buffers, report.layers, report.losses


# gshard's global scope sums over all ranks of the process group, here the pool of four.
@pytest.mark.parametrize(
    ("spec", "world"), [*itertools.product(GLOBAL, [2, 3, 4]), ([{"name": "gshard", "scope": "global"}], 4)], ids=str
)
def test_one_rank_equals_n_ranks(ranks, spec, world):
    """Even, uneven and empty shards; gradients averaged over ranks as data parallelism does."""
    gradients, buffers, report = step(Model(spec), [tokens()])
    for sizes in ([TOKENS // world] * world, [TOKENS - 3 * (world - 1)] + [3] * (world - 1), [TOKENS] + [0] * (world - 1)):
        shards = [[part] for part in tokens().split(sizes)]
        answers = ranks.run(world, step_on_rank, spec, shards, world, TOKENS)
        averaged = [torch.stack(grads).mean(dim=0) for grads in zip(*(a[0] for a in answers), strict=True)]
        assert_same(averaged, gradients)
        for _, found_buffers, layers, _ in answers:
            assert_same(found_buffers, buffers, exact="eqb" in spec and "phi" not in spec)
            assert_same(found_buffers, answers[0][1], exact=True)  # whatever the balancer: the same bits on every rank
            for metric in ("maxvio", "intervention", "dead", "tokens"):
                assert torch.equal(layers[metric].nan_to_num(7), report.layers[metric].nan_to_num(7)), metric


def both_collectives(rank, group, spec, parts_per_rank):
    from evenload.balancers import balance_step as balance

    outcomes = []
    for collective in ("all_reduce", "all_gather"):
        model = Model(spec)
        for part in parts_per_rank[rank]:
            model.loss(part).backward()
        report = balance(model, group, collective=collective)
        outcomes.append((persistent(model), report.layers, report.losses))
    return outcomes


@pytest.mark.parametrize("spec", ["eqb+lei", "qb+gshard", "phi", "loss_free"])
def test_both_collectives_give_the_same_bits(ranks, spec):
    parts = [list(part.split(7)) for part in tokens().split([20, 3, 25, 0])]
    answers = ranks.run(4, both_collectives, spec, parts)
    for outcomes in answers:
        for buffers, layers, losses in outcomes:
            assert_same(buffers, answers[0][0][0], exact=True)
            for found, expected in ((layers, answers[0][0][1]), (losses, answers[0][0][2])):
                assert found.keys() == expected.keys()
                for name, value in found.items():
                    assert torch.equal(value.nan_to_num(7), expected[name].nan_to_num(7)), name


def test_losses_are_means_over_microbatches_and_ranks(ranks):
    parts = [[part] for part in tokens().split(12)]
    alone = []
    for [part] in parts:
        model = Model("lei")
        model.loss(part)
        alone.append(balance_step(model).losses["lei"])
    for _, _, _, losses in ranks.run(4, step_on_rank, "lei", parts, 4, TOKENS):
        torch.testing.assert_close(losses["lei"], torch.stack(alone).mean(dim=0))


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_strength_does_not_change_with_accumulation_or_loss_scaling(spec):
    """n copies of one microbatch, each with loss / n, and a loss scaled by 2**16, give the gradient of one microbatch."""
    gradients, *_ = step(Model(spec), [tokens()])
    assert_same(step(Model(spec), [tokens()] * 4)[0], gradients)
    assert_same(step(Model(spec), [tokens()], scale=2.0**16)[0], gradients)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_strength_does_not_change_with_the_number_of_ranks(ranks, spec):
    """Four ranks with the same microbatch, gradients averaged, give the gradient of that microbatch."""
    gradients, *_ = step(Model(spec), [tokens()])
    answers = ranks.run(4, step_on_rank, spec, [[tokens()]] * 4, 4, 4 * TOKENS)
    assert_same([torch.stack(grads).mean(dim=0) for grads in zip(*(a[0] for a in answers), strict=True)], gradients)


def distributed_data_parallel(rank, group, parts_per_rank):
    """DDP with its defaults, which send rank 0's buffers around before every forward, and accumulation without no_sync."""
    model = Model("eqb+lei+phi")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    for part in parts_per_rank[rank]:
        wrapped(part).mean().backward()
    report = balance_step(wrapped, group)
    return persistent(model), report.layers["tokens"]


def test_ddp_with_its_defaults_changes_nothing(ranks):
    parts = [list(part.split(8)) for part in tokens().split(16)]
    alone = Model("eqb+lei+phi")
    alone(tokens())
    balance_step(alone)
    for buffers, counted in ranks.run(3, distributed_data_parallel, parts):
        assert counted.tolist() == [TOKENS] * 2
        assert_same(buffers, persistent(alone))


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_padding_changes_nothing(spec):
    """Even padding full of NaN, between the real tokens."""
    real = torch.ones(TOKENS + 16, dtype=torch.bool)
    real[[0, 1, 5, *range(20, 30), 40, 41, 63]] = False
    padded = torch.full((TOKENS + 16, WIDTH), float("nan"))
    padded[real] = tokens()
    padded[0] = 3.0
    plain, with_padding = Model(spec), Model(spec)
    with_padding.inner = _NanProof(with_padding.inner)
    for model, x, kw in ((plain, tokens(), {}), (with_padding, padded, {"mask": real})):
        for _ in range(2):
            model.zero_grad()
            model.loss(x, **kw).backward()
            model.report = balance_step(model)
    assert_same([p.grad for p in with_padding.parameters()], [p.grad for p in plain.parameters()])
    assert_same(persistent(with_padding), persistent(plain), exact="eqb" in spec and "phi" not in spec)
    for name, value in plain.report.layers.items():
        torch.testing.assert_close(with_padding.report.layers[name], value, equal_nan=True, rtol=1e-6, atol=1e-7)
    for name, value in plain.report.losses.items():
        torch.testing.assert_close(with_padding.report.losses[name], value, rtol=1e-5, atol=1e-7)


class _NanProof(torch.nn.Module):
    """Keeps the NaN of padding rows out of the linear layer's own weight gradient; the routers still see it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        bad = x.isnan()
        return self.inner(x.masked_fill(bad, 0)).masked_fill(bad.any(dim=-1, keepdim=True), float("nan"))


@pytest.mark.parametrize("spec", [spec for spec in EVERY if spec != "uniform"], ids=str)  # round-robin names its experts
def test_permuting_the_experts_permutes_everything(spec):
    order = torch.randperm(EXPERTS)
    plain = Router(WIDTH, EXPERTS, TOP_K, balancers=spec)
    permuted = copy.deepcopy(plain)
    with torch.no_grad():
        plain.weight.normal_()
        permuted.weight.copy_(plain.weight[order])
    for _ in range(3):
        a, b = plain(tokens()), permuted(tokens())
        assert torch.equal(order[b.indices], a.indices)
        torch.testing.assert_close(a.weights, b.weights)
        for router, routing in ((plain, a), (permuted, b)):
            router.zero_grad()
            routing.weights.square().mean().backward()
            balance_step(router)
        torch.testing.assert_close(plain.weight.grad[order], permuted.weight.grad)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(permuted.state_dict()[name], value[order])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_eval_changes_no_buffer(spec, grad):
    model = Model(spec)
    model.loss(tokens()).backward()
    before = {name: tensor.clone() for name, tensor in carried(model).items()}
    model.eval()
    with torch.set_grad_enabled(grad):
        model(tokens() * 3)
    for name, tensor in carried(model).items():
        assert torch.equal(tensor, before[name]), name
    model.train()
    model.loss(tokens())
    assert any(not torch.equal(buffer, before[name]) for name, buffer in carried(model).items())  # the check can fail


@pytest.mark.parametrize("spec", [spec for spec in EVERY if spec != "sinkhorn"], ids=str)  # its bias is the microbatch's own
def test_eval_routes_with_the_frozen_bias(spec):
    model = Model(spec)
    step(model, [tokens()])
    trained = model.blocks["a"](tokens()).indices
    assert torch.equal(model.eval().blocks["a"](tokens()).indices, trained)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_recomputation_changes_nothing(spec, reentrant):
    outcomes = []
    for recompute in (False, True):
        model = Model(spec)
        step(model, [tokens()])  # a bias to route with
        model.zero_grad()
        x = tokens().requires_grad_()
        loss = checkpoint(model.loss, x, use_reentrant=reentrant) if recompute else model.loss(x)
        (loss / 3).backward()
        statistics = [t.clone() for name, t in carried(model).items() if not name.endswith("loss_grad")]
        gradients = [p.grad for p in model.parameters()] + [x.grad]
        balance_step(model)
        outcomes.append((gradients, statistics, persistent(model)))
    for found, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert_same(found, expected, exact=True)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_save_load_next_step_is_identical(spec, tmp_path):
    model = Model(spec)
    step(model, [tokens()])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    resumed = Model(spec)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.fill_(7)
    resumed.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for found, expected in zip(step(resumed, [tokens()])[:2], step(model, [tokens()])[:2], strict=True):
        assert_same(found, expected, exact=True)


def test_attach_is_balance_step_before_the_optimizer():
    by_hand, hooked = Model("eqb+lei"), Model("eqb+lei")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (by_hand, hooked)]
    attached = attach(hooked, optimizers[1])
    for _ in range(2):
        for model, optimizer in zip((by_hand, hooked), optimizers, strict=True):
            model.zero_grad()
            model.loss(tokens()).backward()
            if model is by_hand:
                report = balance_step(model)
            optimizer.step()
    assert_same(hooked.state_dict().values(), by_hand.state_dict().values(), exact=True)
    assert torch.equal(attached.report.layers["maxvio"], report.layers["maxvio"])
    attached.remove()
    before = persistent(hooked)[0].clone()
    hooked.loss(tokens() * 2).backward()
    optimizers[1].step()
    assert torch.equal(persistent(hooked)[0], before)


def test_a_step_without_any_token_changes_nothing(ranks):
    for answers in ranks.run(3, step_on_rank, "eqb+phi", [[tokens()[:0]]] * 3, 3, 1):
        assert_same(answers[1], persistent(Model("eqb+phi")), exact=True)
    for spec in ("eqb+phi+lei", "qb", "qb_histogram", "loss_free"):
        for seed in range(8):
            torch.manual_seed(seed)
            model = Model(spec)
            step(model, [torch.randn(TOKENS, WIDTH)])
            before = [b.clone() for b in persistent(model)]
            balance_step(model)  # nothing was routed at all
            assert_same(persistent(model), before, exact=True)


def test_routers_are_found_wherever_they_sit():
    assert list(routers(Model("none"))) == ["blocks.a", "last.0"]
    assert list(routers(torch.compile(Model("none")))) == ["_orig_mod.blocks.a", "_orig_mod.last.0"]
    assert list(routers(Router(4, 2, 1))) == [""]
    with pytest.raises(ValueError, match="found no Router in this Linear"):
        balance_step(torch.nn.Linear(2, 2))
