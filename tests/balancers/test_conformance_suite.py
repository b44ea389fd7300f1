"""The conformance suite itself: what is sound passes, and each planted fault fails its own row and no other."""

import logging

import pytest
import torch
from planted_faults import FURTHER, PLANTED, Sound

import evenload
from evenload.balancers.conformance import ROWS, Decision, RankPool, adapter_for, load_target, run_suite
from evenload.models.conformance import LayerAdapter

NUMBERS = [row.number for row in ROWS]
COMBINATIONS = [
    "none",
    *sorted(evenload.BALANCERS),
    "eqb+lei",
    "eqb+phi+z_loss",
    "loss_free+gshard",
    [{"name": "gshard", "scope": "global"}, "qb_histogram"],
    [{"name": "phi", "track": "counts", "update": "microbatch"}],
    [{"name": "lei", "scale": "absolute", "coeff": 1e-3}],
]


@pytest.fixture(scope="module")
def pool():
    logging.disable(logging.INFO)  # torch.compile's trace log, which pytest would collect
    with RankPool() as pool:
        yield pool
    logging.disable(logging.NOTSET)


def failures(results):
    return {result.row.number: result.reason for result in results if result.status == "fail"}


def test_rows_are_numbered_and_say_what_to_do():
    assert list(range(1, 27)) == NUMBERS
    assert all(row.fault and row.seen and row.target and row.remedy for row in ROWS)


def test_every_row_applies_to_a_sound_router(pool):
    assert {result.row.number: result.status for result in run_suite(Sound(), pool=pool)} == dict.fromkeys(NUMBERS, "pass")


@pytest.mark.parametrize("row", NUMBERS)
def test_a_planted_fault_fails_its_row_and_no_other(pool, row):
    assert list(failures(run_suite(PLANTED[row](), pool=pool))) == [row]


@pytest.mark.parametrize(("row", "fault"), FURTHER)
def test_other_ways_to_fail(pool, row, fault):
    assert failures(run_suite(fault(), [row], pool))


@pytest.mark.parametrize("spec", COMBINATIONS, ids=str)
def test_our_routers_pass(pool, spec):
    results = run_suite(LayerAdapter(spec), pool=pool)
    assert failures(results) == {}
    assert all(result.reason for result in results)


@pytest.mark.parametrize("score", ["softmax", "identity"])
def test_our_routers_pass_with_other_scores(pool, score):
    assert failures(run_suite(LayerAdapter("eqb+gshard+lei+phi+z_loss", score=score), pool=pool)) == {}


def test_a_bare_router_is_checked_as_it_is(pool):
    found = {result.row.number: result for result in run_suite(load_target("my_router:TopKRouter"), pool=pool)}
    assert set(failures(found.values())) == {10, 11}
    assert {number for number, result in found.items() if result.status == "pass"} == {3, 6, 12, 15, 22, 23}


def test_a_biased_router_is_checked_as_it_is(pool):
    """Ignores its mask, counts in eval and again in recomputation, loses float32 and sums over no ranks."""
    wrong = failures(run_suite(load_target("my_router:BiasRouter"), pool=pool))
    assert set(wrong) == {1, 2, 4, 5, 6, 7, 9, 10, 11, 15, 20}
    assert "expert_bias" in wrong[7]


@pytest.mark.parametrize("name", ["OwnBias", "OwnRouter"])
def test_a_balancer_or_a_subclass_of_ones_own(pool, name):
    assert failures(run_suite(load_target(f"my_router:{name}"), pool=pool)) == {}


def test_an_adapter_that_ranks_cannot_load_is_told_so(pool):
    class Local(Sound):
        pass

    [result] = run_suite(Local(), [26], pool)
    assert result.status == "fail"
    assert "define it in a module" in result.reason
    assert failures(run_suite(Sound(), [26], pool)) == {}  # the ranks serve on


def test_an_error_in_a_router_is_evidence(pool):
    class Broken(Sound):
        def route(self, router, x, **context):
            raise RuntimeError("out of cheese\nredo from start")

    [result] = run_suite(Broken(), [4], pool)
    assert (result.status, result.reason) == ("fail", "RuntimeError: out of cheese")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mixtral", r"write evenload:BALANCERS, transformers:ARCHITECTURE, or my_module:MyRouter"),
        ("no_such:Router", "no module no_such"),
        ("my_router:TopkRouter", r"has no TopkRouter; it has .*TopKRouter"),
        ("my_router:SOMETHING", "is int; give a router class"),
        ("my_router:ConfigRouter", r"ConfigRouter\(config\) takes the number of experts under no name.*write an Adapter"),
        ("my_router:DenseRouter", r"returns float32 \(5, 8\).*wanted are integer indices.*write an Adapter"),
        ("my_router:HoldsOurs", r"holds an evenload.Router"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_the_remedy(target, message):
    with pytest.raises(ValueError, match=message):
        load_target(target)


def test_unknown_rows_are_refused():
    with pytest.raises(ValueError, match="no row 27; the rows are 1 to 26"):
        run_suite(Sound(), [27])


def test_the_suite_leaves_no_trace(pool):
    """Random state, grad mode and warnings are the caller's."""
    adapter = Sound()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        run_suite(adapter, [1, 4, 22], pool)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)


def test_indices_and_weights_are_found_in_either_order():
    adapter = adapter_for(load_target("my_router:TopKRouter").router_class)
    decision = adapter.route(adapter.build(4, 4), torch.randn(3, 4))  # K = E: shapes no longer tell
    assert isinstance(decision, Decision)
    assert not decision.indices.is_floating_point()
    assert decision.logits.shape == decision.weights.shape == (3, 4)
    torch.testing.assert_close(decision.weights.sum(dim=1), torch.ones(3))
