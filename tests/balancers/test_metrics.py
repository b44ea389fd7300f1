import math

import pytest
import torch

from evenload import Router, balance_step, metrics
from evenload.balancers.collective import run_lockstep

COUNTS = torch.tensor([[4, 4, 4, 4], [10, 4, 2, 0], [0, 0, 16, 0]])


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (metrics.max_vio, [0, 1.5, 3]),
        (metrics.min_vio, [0, -1, -1]),
        (metrics.lis, [1, 2.5, 4]),
        (metrics.coefficient_of_variation, [0, math.sqrt(14) / 4, math.sqrt(3)]),
        (metrics.load_entropy, [1, -sum(p * math.log(p) for p in (10 / 16, 4 / 16, 2 / 16)) / math.log(4), 0]),
        (metrics.top_share, [4 / 16, 10 / 16, 1]),
        (metrics.dead_experts, [0, 1, 3]),
    ],
)
def test_by_hand(metric, expected):
    assert metric(COUNTS).tolist() == pytest.approx(expected)
    assert metric(COUNTS[1]).item() == pytest.approx(expected[1])


def test_top_share_takes_a_tenth_of_the_experts():
    counts = torch.arange(20)
    assert metrics.top_share(counts).item() == pytest.approx((19 + 18) / 190)


def test_no_tokens_is_not_a_balance():
    assert metrics.max_vio(torch.zeros(3, dtype=torch.int64)).isnan()
    assert metrics.dead_experts(torch.zeros(3, dtype=torch.int64)) == 3
    assert math.isnan(metrics.sampling_floor(0, 8, 2))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(512, 16, 2), (4096, 16, 2), (64, 32, 4), (8, 8, 1)])
def test_sampling_floor_equals_simulated_random_routing(tokens, experts, top_k):
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(300):
        chosen = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
        draws.append(metrics.max_vio(torch.bincount(chosen.flatten(), minlength=experts)))
    assert metrics.sampling_floor(tokens, experts, top_k) == pytest.approx(float(torch.stack(draws).mean()), rel=0.06)


def test_sampling_floor_leaves_the_global_generator_alone():
    metrics.sampling_floor.cache_clear()
    state = torch.get_rng_state()
    metrics.sampling_floor(100, 8, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_intervention_rate_counts_overruled_choices():
    logits = torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0]])
    router = Router(None, 4, 2, balancers="eqb", score="identity")
    router.balancers[0].bias.copy_(torch.tensor([-2.5, 0, 0, 0]))  # chooses 1, 2 where the router wants 0, 1
    router(logits)
    assert balance_step(router).layers["intervention"].item() == 0.5
    assert metrics.intervention_rate(torch.tensor(2), torch.tensor(2), 2).item() == 0.5


def test_local_and_global_maxvio():
    """Two microbatches, each on one expert: locally as bad as can be, globally perfect."""
    router = Router(None, 2, 1, balancers="none")
    for favourite in (0, 1):
        router(torch.nn.functional.one_hot(torch.full((4,), favourite), 2).float())
    router(torch.zeros(0, 2))  # an empty microbatch is no microbatch
    layers = balance_step(router).layers
    assert layers["maxvio"].item() == 0
    assert layers["maxvio_local"].item() == layers["maxvio_local_worst"].item() == 1
    assert layers["intervention"].isnan()


def test_residual_is_the_step_routed_again_with_its_own_bias():
    logits = torch.randn(512, 8) + torch.arange(8) / 4
    router = Router(None, 8, 2, balancers="eqb", measure_residual=True)
    for _ in range(5):
        for part in logits.split(100):
            router(part)
        residual = balance_step(router).layers["residual"].item()
    assert residual == metrics.max_vio(router.eval()(logits).counts).item()
    assert residual < 0.1
    router.train()(logits)
    assert balance_step(Router(None, 8, 2, balancers="eqb")).layers["residual"].isnan()


def test_summary_reads_like_a_table():
    model = torch.nn.ModuleDict({name: Router(None, 4, 2, balancers="eqb+lei") for name in ("first", "second")})
    for router in model.values():
        router(torch.randn(64, 4))
    report = balance_step(model)
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["layer", "MaxVio", "floor"]
    assert [line.split()[0] for line in lines[1:]] == ["first", "second", "mean"]
    assert "lei loss" in lines[0]
    assert "residual" not in lines[0]  # not measured, not shown


def test_layers_may_differ():
    model = torch.nn.ModuleList(
        [Router(None, 4, 2, balancers="eqb+lei"), Router(None, 6, 1, balancers="gshard"), Router(4, 3, 1)]
    )
    for router, width in zip(model, (4, 6, 4), strict=True):
        router(torch.randn(64, width))
    report = balance_step(model)
    assert [len(counts) for counts in report.counts] == [4, 6, 3]
    assert report.losses["lei"].isnan().tolist() == [False, True, True]
    assert report.losses["gshard"].isnan().tolist() == [True, False, True]
    assert report.layers["bias_span"].isnan().tolist() == [False, True, True]


def test_unknown_collective_is_refused():
    with pytest.raises(ValueError, match=r"collective='broadcast'.*'all_reduce', 'all_gather'"):
        run_lockstep([], None, "broadcast")
