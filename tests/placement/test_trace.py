import pytest
import torch
from torch.utils.checkpoint import checkpoint

from evenload import Router
from evenload.placement import Demand, record_demand


def model():
    return torch.nn.Sequential(*(Router(8, 4, 2, balancers="lei") for _ in range(3)))


def run(layers, x, **kw):
    return sum(layer(x, **kw).weights.sum() for layer in layers)


@pytest.mark.parametrize("recompute", [None, False, True])
def test_counts_of_every_microbatch_once(recompute):
    layers, batches = model(), [torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)]
    with record_demand(layers) as demand:
        for x in batches:
            loss = run(layers, x) if recompute is None else checkpoint(run, layers, x, use_reentrant=recompute)
            loss.backward()
    assert demand.counts.shape == (2, 3, 4)
    for counts, x in zip(demand.counts, batches, strict=True):
        assert torch.equal(counts, torch.stack([layer.eval()(x).counts for layer in layers]))
    run(layers, batches[0])
    assert len(demand.microbatches) == 2  # the hooks are gone


def test_padding_is_no_demand():
    layers, mask = model(), torch.tensor([True, False, True])
    with record_demand(layers) as demand:
        run(layers, torch.randn(3, 8), mask=mask)
    assert demand.counts.sum(dim=-1).tolist() == [[4, 4, 4]]


def test_save_and_load(tmp_path):
    layers = model()
    with record_demand(layers) as demand:
        run(layers, torch.randn(3, 8))
    demand.save(tmp_path / "trace.pt")
    loaded = Demand.load(tmp_path / "trace.pt")
    assert loaded.layers == demand.layers == ("0", "1", "2")
    assert torch.equal(loaded.counts, demand.counts)


def test_refuses_what_has_no_one_shape():
    with (
        pytest.raises(ValueError, match=r"one number of experts; this ModuleList has \{'0': 4, '1': 8\}"),
        record_demand(torch.nn.ModuleList([Router(8, 4, 2), Router(8, 8, 2)])),
    ):
        pass
    with pytest.raises(ValueError, match="empty"):
        _ = Demand(("0",)).counts


def test_a_router_that_runs_twice_a_pass_is_refused():
    layers = model()
    with record_demand(layers):
        layers[0](torch.randn(3, 8))
        with pytest.raises(RuntimeError, match="router '0' ran twice before '1' ran"):
            layers[0](torch.randn(3, 8))
