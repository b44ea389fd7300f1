"""The three quantile estimators: the paper's vector, the paper's simulation, and the numbers of public implementations."""

import json
from pathlib import Path

import pytest
import torch

from evenload import ExactQuantile, GShardLoss, HistogramQuantile, Router, ShardQuantile, ZLoss, balance_step, route

PEERS = json.loads((Path(__file__).parents[1] / "data" / "peers.json").read_text())
FOUR_TOKENS = torch.tensor([[2, 0.5, -2, -1], [2, 3, 0.5, -1], [0, 2, -0.5, -1], [2, 0, -1.5, -1]])


@pytest.mark.parametrize("balancer", [ExactQuantile, ShardQuantile])
def test_four_token_vector(balancer):
    router = Router(None, 4, 2, balancers=[balancer], score="identity")
    assert router(FOUR_TOKENS).counts.tolist() == [4, 4, 0, 0]
    balance_step(router)
    assert router.balancers[0].bias.tolist() == [-1, -1, 1, 1]
    assert router(FOUR_TOKENS).counts.tolist() == [2, 2, 2, 2]


def test_averaging_the_quantiles_of_two_halves_differs_from_the_quantile():
    """Two shards of two tokens: expert 0 would get -1.0 instead of -1.5 (before centring)."""
    exact, shards = (Router(None, 4, 2, balancers=[b], score="identity") for b in (ExactQuantile, ShardQuantile))
    for router in (exact, shards):
        for half in FOUR_TOKENS.split(2):
            router(half)
    assert (shards.balancers[0].quantile_sum / 2)[0] == 1.0
    for router in (exact, shards):
        balance_step(router)
    assert exact.balancers[0].bias.tolist() == [-1, -1, 1, 1]
    assert shards.balancers[0].bias.tolist() != [-1, -1, 1, 1]


@pytest.mark.parametrize("balancer", [ExactQuantile(), ExactQuantile(space="scores"), ShardQuantile(), HistogramQuantile()])
def test_simulation_of_the_paper(balancer):
    """T=8192, E=32, K=4, sigmoid, one update per batch: MaxVio falls below 0.05 within six updates (QB paper: 0.017)."""
    logits = 0.3 * torch.randn(32) + torch.randn(8192, 32)
    router = Router(None, 32, 4, balancers=[balancer])
    history = []
    for _ in range(7):
        router(logits)
        history.append(float(balance_step(router).layers["maxvio"]))
    assert history[0] > 1
    assert history[6] < 0.05


def test_an_added_bias_with_the_wrong_sign_diverges():
    """Guards the simulation above: it must be able to fail."""
    logits = 0.3 * torch.randn(32) + torch.randn(8192, 32)
    router = Router(None, 32, 4, balancers="eqb")
    for _ in range(3):
        router(logits)
        report = balance_step(router)
        router.balancers[0].bias.neg_()
    assert float(report.layers["maxvio"]) > 1


@pytest.mark.parametrize("case", PEERS["quantile"])
def test_shard_quantile_equals_megatron(case):
    logits = torch.tensor(case["logits"])
    router = Router(None, logits.shape[1], case["top_k"], balancers=[ShardQuantile()])
    for step in case["steps"]:
        routing = router(logits)
        # A quantile bias puts tokens exactly ON the cutoff: only rows with a clear gap have one right answer.
        biased = (logits + router.balancers[0].bias).sort(dim=1, descending=True).values
        clear = biased[:, case["top_k"] - 1] - biased[:, case["top_k"]] > 1e-5
        assert clear.float().mean() > 0.3
        expected = torch.tensor(step["selected"]).sort(dim=1).values
        assert torch.equal(routing.indices.sort(dim=1).values[clear], expected[clear])
        balance_step(router)
        bias = torch.tensor(step["bias_uncentred"])
        torch.testing.assert_close(router.balancers[0].bias, bias - bias.mean(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", PEERS["histogram"])
def test_histogram_equals_transformer_engine(case):
    logits = torch.tensor(case["logits"])
    router = Router(None, logits.shape[1], case["top_k"], balancers=[HistogramQuantile(case["num_bins"])])
    balancer = router.balancers[0]
    balancer.bias.copy_(torch.tensor(case["bias"]))
    routing = router(logits)
    assert torch.equal(routing.indices.sort(dim=1).values, torch.tensor(case["selected"]).sort(dim=1).values)
    torch.testing.assert_close(torch.stack(balancer.bounds()), torch.tensor(case["bounds"]), atol=1e-6, rtol=0)
    expected = torch.zeros_like(balancer.histogram)
    for expert, bins in case["counts"].items():
        for index, count in bins.items():
            expected[int(expert), int(index)] = count
    assert torch.equal(balancer.histogram, expected)


@pytest.mark.parametrize("case", PEERS["aux_loss"] + PEERS["padded_aux_loss"])
def test_gshard_equals_megatron_and_mixtral(case):
    logits = torch.tensor(case["logits"])
    mask = torch.tensor(case["mask"], dtype=torch.bool).flatten() if "mask" in case else None
    router = Router(None, logits.shape[1], case["top_k"], balancers=[GShardLoss(coeff=1.0)], score="softmax")
    router(logits, mask=mask)
    value = float(balance_step(router).losses["gshard"])
    assert value * case["top_k"] == pytest.approx(case["hf_mixtral_value_without_coeff"], abs=1e-5)
    if "megatron_value" in case:
        assert value * case["coeff"] == pytest.approx(case["megatron_value"], abs=1e-7)


@pytest.mark.parametrize("case", PEERS["z_loss"])
def test_z_loss_equals_megatron(case):
    logits = torch.tensor(case["logits"])
    router = Router(None, logits.shape[1], 1, balancers=[ZLoss(case["coeff"])])
    router(logits)
    assert float(balance_step(router).losses["z_loss"]) == pytest.approx(case["value"], abs=1e-8)


def test_eqb_takes_the_order_statistic_of_the_whole_step():
    """Against the definition, written with a sort: microbatches of uneven size, odd E, a fair share that is no integer."""
    experts, top_k = 7, 3
    router = Router(None, experts, top_k, balancers="eqb")
    batches = [torch.randn(size, experts) for size in (5, 1, 17)]
    for batch in batches:
        router(batch)
    logits = torch.cat(batches)
    alpha = -logits.sort(dim=1, descending=True).values[:, top_k]
    margins = (logits + alpha[:, None]).bfloat16().float()
    rank = logits.shape[0] * top_k // experts
    expected = -margins.sort(dim=0, descending=True).values[rank]
    balance_step(router)
    torch.testing.assert_close(router.balancers[0].bias, expected - expected.mean(), atol=0, rtol=0)


def test_a_dense_histogram_gives_the_same_bias(monkeypatch):
    """Past a number of rows the values are folded into a histogram: same answer."""
    from evenload.balancers import order_statistic

    batches = [torch.randn(40, 8) for _ in range(5)]
    biases = []
    for rows in (10**6, 100):
        monkeypatch.setattr(order_statistic, "_DENSE_ROWS", rows)
        router = Router(None, 8, 2, balancers="eqb")
        for batch in batches:
            router(batch)
        assert (router.balancers["eqb"].margins.dense is None) == (rows == 10**6)
        balance_step(router)
        biases.append(router.balancers[0].bias)
    assert torch.equal(*biases)


def test_experts_that_nobody_may_choose_keep_a_finite_bias():
    router = Router(None, 4, 1, balancers="eqb")
    logits = torch.randn(16, 4)
    logits[:, 3] = float("-inf")
    router(logits)
    balance_step(router)
    assert router.balancers[0].bias.isfinite().all()


def test_groups_are_respected_by_exact_quantile():
    router = Router(None, 16, 4, balancers="eqb", num_groups=4, group_top_k=2)
    logits = torch.randn(1024, 16) + torch.arange(16) / 8
    history = []
    for _ in range(12):
        groups = router(logits).indices // 4
        assert all(len(set(row)) <= 2 for row in groups.tolist())
        history.append(float(balance_step(router).layers["maxvio"]))
    assert history[-1] < 0.2 * history[0]


def test_a_token_is_no_candidate_for_experts_of_groups_it_does_not_reach():
    """Against the definition: the margin of an expert outside the token's groups is -inf."""
    options = {"num_groups": 4, "group_top_k": 2}
    router, logits = Router(None, 16, 4, balancers="eqb", **options), torch.randn(512, 16)
    routing = route(logits, 4, **options)
    margins = (logits - routing.cutoff[:, None]).bfloat16().float().masked_fill(~routing.allowed, float("-inf"))
    expected = -margins.sort(dim=0, descending=True).values[512 * 4 // 16]
    router(logits)
    balance_step(router)
    torch.testing.assert_close(router.balancers[0].bias, expected - expected.mean(), atol=0, rtol=0)


def test_a_margin_that_does_not_exist_is_not_the_best_one():
    """Tokens with no more than K possible experts have no cutoff; their impossible experts must not come out on top."""
    logits = torch.randn(1024, 6)
    logits[:300, 2:] = float("-inf")
    for balancer in ("qb", "eqb"):
        router = Router(None, 6, 2, balancers=balancer)
        for _ in range(8):
            counts = router(logits).counts
            balance_step(router)
        assert counts[2:].max() - counts[2:].min() < 0.1 * counts[2:].float().mean()


def test_ema_keeps_a_share_of_the_old_bias():
    router = Router(None, 4, 2, balancers=[ShardQuantile(ema=0.75)], score="identity")
    router(FOUR_TOKENS)
    balance_step(router)
    assert router.balancers[0].bias.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_route_is_the_same_function_without_a_module():
    bias = torch.tensor([-1.0, -1, 1, 1])
    routing = route(FOUR_TOKENS, 2, bias=bias, score="identity")
    assert routing.counts.tolist() == [2, 2, 2, 2]
    assert torch.equal(routing.weights, FOUR_TOKENS.gather(1, routing.indices))  # the bias never touches the weights
