"""What happens around a step: compiled microbatches, thrown-away steps, checkpoints of another kind, copies, wrong groups."""

import copy
import warnings

import pytest
import torch
from state import carried
from torch import distributed as dist

import evenload
from evenload import Balancer, LoadErrorInjection, Router, balance_step, discard_step


@pytest.mark.parametrize("residual", [False, True])
def test_many_microbatches_compile_a_few_times(residual):
    """EQB keeps the step's margins: their growth must not make torch.compile start anew each time (it gives up after 8)."""
    torch._dynamo.reset()
    eager = Router(16, 8, 2, balancers="eqb+lei", measure_residual=residual)
    owner = copy.deepcopy(eager)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(owner, fullgraph=True, backend=backend)
    for _ in range(2):
        for _ in range(12):
            x = torch.randn(32, 16)
            eager(x)
            compiled(x)
        residuals = [balance_step(router).layers["residual"].item() for router in (eager, owner)]
        assert residuals[0] == residuals[1] or not residual
    assert torch.equal(eager.balancers["eqb"].bias, owner.balancers["eqb"].bias)
    assert len(graphs) <= 6


def test_nan_rows_stay_out_of_the_gates_gradient():
    router = Router(16, 8, 2, balancers="eqb+lei+z_loss", nan="route")
    x = torch.randn(32, 16)
    x[3] = float("nan")
    router(x).weights.sum().backward()
    assert router.weight.grad.isfinite().all()
    assert balance_step(router).layers["nan_rows"].item() == 1


def test_groups_intervention_and_residual_know_other_groups():
    """The bias moves every token from experts 0, 1 to experts 2, 3: all choices are overruled."""
    router = Router(None, 8, 2, balancers="loss_free", score="identity", num_groups=4, group_top_k=1, measure_residual=True)
    logits = torch.tensor([[2.0, 2, 1, 1, 0, 0, 0, 0]]).repeat(8, 1)
    router.balancers["loss_free"].bias[2:4] = 5.0
    assert set(router(logits).indices.flatten().tolist()) == {2, 3}
    layers = balance_step(router).layers
    assert layers["intervention"].item() == 1
    assert layers["residual"].item() == evenload.metrics.max_vio(router(logits).counts).item()


def test_a_state_dict_belongs_to_its_balancer():
    exact, free = Router(8, 4, 2, balancers="eqb"), Router(8, 4, 2, balancers="loss_free")
    with pytest.raises(RuntimeError, match=r"balancers\.loss_free\.bias"):
        free.load_state_dict(exact.state_dict())
    one, other = Router(8, 4, 2, balancers="eqb+phi"), Router(8, 4, 2, balancers="phi+eqb")
    other.load_state_dict(one.state_dict())


def test_balancers_by_position_and_by_name():
    router = Router(8, 4, 2, balancers="eqb+lei")
    assert [balancer.name for balancer in router.balancers] == ["eqb", "lei"]
    assert router.balancers[0] is router.balancers["eqb"]
    assert len(router.balancers) == 2


def test_loading_starts_the_step_anew():
    router = Router(8, 4, 2, balancers="eqb+lei")
    router(torch.randn(64, 8))
    router.load_state_dict(router.state_dict())
    router(torch.randn(10, 8))
    assert balance_step(router).layers["tokens"].item() == 10


@pytest.mark.parametrize("built_on_meta", [False, True])
def test_assigning_a_bfloat16_checkpoint_keeps_the_bias_in_float32(built_on_meta):
    source = Router(8, 4, 2, balancers="eqb+lei")
    narrow = {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}
    with torch.device("meta" if built_on_meta else "cpu"):
        router = Router(8, 4, 2, balancers="eqb+lei")
    router.load_state_dict(narrow, assign=True)
    assert router.balancers["eqb"].bias.dtype == torch.float32
    router(torch.randn(64, 8)).weights.sum().backward()
    assert balance_step(router).layers["tokens"].item() == 64


def test_the_default_dtype_is_nobodys_business():
    torch.set_default_dtype(torch.float16)
    try:
        router = Router(8, 4, 2, balancers=["lei", {"name": "phi", "track": "counts"}, "qb_histogram"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(tensor.dtype in (torch.float32, torch.float64, torch.int64) for tensor in carried(router).values())


def test_a_discarded_step_leaves_no_trace():
    model = torch.nn.Sequential(Router(8, 4, 2, balancers="eqb+phi"))
    kept = copy.deepcopy(model)
    model(torch.randn(64, 8))
    discard_step(model)
    x = torch.randn(32, 8)
    for each in (model, kept):
        each(x)
        assert balance_step(each).layers["tokens"].item() == 32
    for found, expected in zip(carried(model).values(), carried(kept).values(), strict=True):
        assert torch.equal(found, expected)


def test_checkpointing_may_drop_injected_gradients():
    """They are saved where saved-tensor hooks see them."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor.shape), tensor)[1], lambda tensor: tensor
    ):
        for name in ("none", "z_loss"):
            Router(8, 4, 2, balancers=name)(torch.randn(100, 8))
            saved.append(name)
    without, with_loss = saved[: saved.index("none")], saved[saved.index("none") + 1 :]
    assert with_loss.count((100, 4)) > without.count((100, 4))


def test_an_expert_that_is_ruled_out_takes_no_part_in_sinkhorn():
    logits = torch.randn(256, 4) + torch.tensor([2.0, 0, 0, 0])
    logits[:, 3] = float("-inf")
    counts = Router(None, 4, 2, balancers="sinkhorn")(logits).counts
    assert counts[3] == 0
    assert counts[:3].max() - counts[:3].min() < 30


def test_padding_inside_a_document_does_not_split_it():
    router = Router(None, 4, 1, balancers=[{"name": "gshard", "coeff": 1.0, "scope": "sequence"}], score="softmax")
    logits = torch.randn(6, 4)
    real = torch.tensor([True, True, False, True, True, False])
    values = []
    for ids in (torch.tensor([5, 5, 5, 5, 6, 6]), torch.tensor([5, 5, 0, 5, 6, 0])):
        router(logits, mask=real, document_ids=ids)
        values.append(balance_step(router).losses["gshard"].item())
    router(logits[real], document_ids=torch.tensor([5, 5, 5, 6]))
    values.append(balance_step(router).losses["gshard"].item())
    assert values == pytest.approx([values[0]] * 3)


def run_without_balancing(router, x, steps):
    optimizer = torch.optim.AdamW(router.parameters(), fused=True) if router.weight is not None else None
    for _ in range(steps):
        router(x).weights.sum().backward()
        if optimizer is not None:
            optimizer.step()


@pytest.mark.parametrize("width", [None, 4])
def test_never_balancing_is_noticed_where_the_gate_does_not_tell(width):
    with pytest.warns(UserWarning, match="balance_step") as caught:
        run_without_balancing(Router(width, 4, 2, balancers="eqb"), torch.randn(8, 4, requires_grad=True), 300)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_without_balancing(Router(width, 4, 2, balancers="z_loss"), torch.randn(8, 4, requires_grad=True), 300)


class Nameless(Balancer):
    def selection_bias(self, selection, mask):
        return torch.tensor([0.0, 0, 0, 300])

    def build(self):
        self.add_state("calls", (), dtype=torch.int64)

    def update(self):  # no yield: local
        self.calls += 1

    def report(self):
        return {"calls": self.calls}


def test_a_minimal_balancer_of_ones_own():
    router = Router(None, 4, 1, balancers=[Nameless])
    reports = []
    for _ in range(3):
        assert router(torch.randn(5, 4)).counts.tolist() == [0, 0, 0, 5]
        reports.append(balance_step(router))
    assert router.balancers[0].name == "Nameless"
    assert [report.layers["calls"].item() for report in reports] == [1, 2, 3]


def nan_on_one_rank(rank, group):
    values = torch.tensor([1.0, float("nan") if rank == 1 else 2.0]).bfloat16()
    try:
        evenload.global_order_statistic(values, 0, group)
    except ValueError as error:
        return str(error)


def test_nan_on_one_rank_is_an_error_on_all(ranks):
    assert all("1 of the values are NaN" in message for message in ranks.run(3, nan_on_one_rank))


def not_a_member(rank, group):
    outside = dist.new_group([0])
    router = Router(None, 4, 2, balancers="eqb")
    router(torch.randn(8, 4))
    try:
        balance_step(router, outside)
    except ValueError as error:
        return str(error)


def test_a_process_outside_the_group_is_told(ranks):
    answers = ranks.run(4, not_a_member)
    assert answers[0] is None
    assert all("not a member of the group" in message for message in answers[1:])


def expert_parallel(rank, group, parts):
    router = Router(None, 4, 1, balancers=[LoadErrorInjection(0.5, tau=1e6, group=group)], score="identity")
    router = copy.deepcopy(router)
    leaf = parts[rank].clone().requires_grad_()
    router(leaf).weights.sum().backward()
    return leaf.grad - torch.nn.functional.one_hot(parts[rank].argmax(dim=1), 4)


def test_load_errors_of_an_expert_parallel_group(ranks):
    """Counts are summed over the group; the gradient is still a mean over the rank's own tokens."""
    parts = list(torch.randn(12, 4).split([5, 7]))
    counts = torch.bincount(torch.cat(parts).argmax(dim=1), minlength=4)
    rho = counts * 4 / 12 - 1
    for gradient, part in zip(ranks.run(2, expert_parallel, parts), parts, strict=True):
        torch.testing.assert_close(gradient, (0.5 * rho / len(part)).expand_as(part), atol=1e-6, rtol=1e-4)
