import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from state import carried
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evenload.balancers import balance_step
from evenload.models import GPT, GPTConfig, MoELayer

CONFIG = GPTConfig(
    vocab_size=40,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    num_dense_layers=1,
    num_experts=4,
    expert_hidden=12,
    shared_hidden=8,
    z_loss=1e-3,
    loss_chunk=7,
    init_std=0.2,
    balancers=[{"name": "eqb"}, {"name": "lei", "coeff": 0.5}],
)


def make(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(CONFIG, **changes))


def batch(rows: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:].clone()


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def state(model: GPT) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **carried(model)}


@pytest.mark.parametrize("tied", [True, False])
def test_meta_construction_gives_the_same_model(tied: bool) -> None:
    direct = make(seed=3, tie_embeddings=tied, post_norm=tied)
    with torch.device("meta"):
        model = GPT(direct.config)
    assert all(tensor.is_meta for tensor in state(model).values())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in state(model).values():
            tensor.fill_(7)
    torch.manual_seed(3)
    model.reset_parameters()
    for name, tensor in state(direct).items():
        assert torch.equal(state(model)[name], tensor), name


def test_residual_projections_start_smaller() -> None:
    model = make(d_model=64, expert_hidden=64, num_dense_layers=1)
    small = CONFIG.init_std / (2 * CONFIG.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            expected = small if name.endswith(("out.weight", "down.weight", "w_down")) else CONFIG.init_std
            assert parameter.std().item() == pytest.approx(expected, rel=0.15), name


def test_loss_is_that_of_the_logits() -> None:
    model = make()
    tokens, targets = batch()
    targets[0, 3:] = -100
    output, logits = model(tokens, targets), model(tokens).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    z = logits.logsumexp(-1).square()[targets != -100].sum()
    torch.testing.assert_close(output.nll_sum, nll)
    torch.testing.assert_close(output.loss, (nll + 1e-3 * z) / 12)
    assert int(output.num_targets) == 12
    assert output.logits is None


def test_injected_gradients_follow_the_scale_of_the_loss() -> None:
    plain, scaled = make(), make()
    tokens, targets = batch()
    plain(tokens, targets).loss.backward()
    (scaled(tokens, targets).loss * 1024).backward()
    assert_same({name: grad / 1024 for name, grad in gradients(scaled).items()}, gradients(plain))


def test_routers_are_told_of_padding_and_documents() -> None:
    model, heard = make(), []
    router = model.blocks[1].ffn.router
    router.register_forward_pre_hook(lambda module, args, kwargs: heard.append(kwargs), with_kwargs=True)
    ids, mask = torch.tensor([[1] * 4 + [2] * 5, [3] * 9]), torch.ones(2, 9, dtype=torch.bool)
    model(*batch(), document_ids=ids, mask=mask)
    assert heard == [{"mask": mask, "document_ids": ids}]


@pytest.mark.parametrize("where", ["right", "left", "rows"])
def test_padding_changes_nothing(where: str) -> None:
    real_tokens, real_targets = batch(1, 8)
    rows, length = (3, 8) if where == "rows" else (1, 12)
    first = {"right": 0, "left": 4, "rows": 8}[where]
    mask = torch.zeros(rows * length, dtype=torch.bool)
    mask[first : first + 8] = True
    tokens = torch.randint(0, CONFIG.vocab_size, (rows * length,)).masked_scatter(mask, real_tokens)
    targets = torch.randint(0, CONFIG.vocab_size, (rows * length,)).masked_scatter(mask, real_targets)

    plain, padded = make(), make()
    expected = plain(real_tokens, real_targets)
    expected.loss.backward()
    got = padded(tokens.view(rows, length), targets.view(rows, length), mask=mask.view(rows, length))
    got.loss.backward()
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.nll_sum, expected.nll_sum)
    assert int(got.num_targets) == 8
    assert_same(gradients(padded), gradients(plain), rtol=1e-4, atol=1e-6)
    counts, expected_counts = balance_step(padded).counts, balance_step(plain).counts
    assert all(torch.equal(a, b) for a, b in zip(counts, expected_counts, strict=True))


def test_what_padding_holds_does_not_matter() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]).bool()
    tokens, targets = batch()
    results = []
    for _ in range(2):
        model = make()
        tokens = torch.where(mask, tokens, torch.randint(0, CONFIG.vocab_size, mask.shape))
        targets = torch.where(mask, targets, torch.randint(0, CONFIG.vocab_size, mask.shape))
        loss = model(tokens, targets, mask=mask).loss
        loss.backward()
        results.append((loss, gradients(model)))
        torch.manual_seed(1)
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


def test_packed_documents_are_separate_documents() -> None:
    # Routing weights do not depend on other tokens; lei does, so it stays out of this comparison.
    apart, packed = make(balancers="eqb"), make(balancers="eqb")
    documents = [batch(1, length) for length in (5, 1, 8)]
    for tokens, targets in documents:
        (apart(tokens, targets).loss * targets.numel() / 14).backward()
    ids = torch.tensor([[4] * 5 + [2] * 1 + [4] * 8])
    output = packed(*(torch.cat(parts, dim=1) for parts in zip(*documents, strict=True)), document_ids=ids)
    output.loss.backward()
    total = sum(apart.eval()(tokens, targets).nll_sum for tokens, targets in documents)
    torch.testing.assert_close(output.nll_sum, total)
    assert_same(gradients(packed), gradients(apart), rtol=1e-4, atol=1e-6)


def test_future_tokens_do_not_change_the_past() -> None:
    model = make().eval()
    tokens, _ = batch(1, 9)
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % CONFIG.vocab_size
    a, b = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_finite_differences_of_the_whole_model() -> None:
    model = make(balancers=(), z_loss=0.1).double()
    tokens, targets = batch()
    model(tokens, targets).loss.backward()
    for parameter in model.parameters():
        direction = torch.randn_like(parameter)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
                losses.append(model(tokens, targets).loss)
                parameter.sub_(direction, alpha=sign * 1e-6)
        slope = (losses[0] - losses[1]) / 2e-6
        torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=1e-4, atol=1e-7)


@contextlib.contextmanager
def checkpointed(model: GPT, reentrant: bool) -> Iterator[None]:
    plain = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, plain, strict=True):
        block.forward = functools.partial(checkpoint, forward, use_reentrant=reentrant)
    yield
    for block, forward in zip(model.blocks, plain, strict=True):
        block.forward = forward


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    plain, recomputing = make(capacity_factor=0.8), make(capacity_factor=0.8)
    tokens, targets = batch()
    ids = torch.tensor([[1] * 4 + [2] * 5, [3] * 9])
    expected = plain(tokens, targets, document_ids=ids)
    expected.loss.backward()
    with checkpointed(recomputing, reentrant):
        got = recomputing(tokens, targets, document_ids=ids)
        got.loss.backward()
    assert torch.equal(got.loss, expected.loss)
    assert_same(gradients(recomputing), gradients(plain), rtol=0, atol=0)
    dropped = plain.pop_dropped()
    assert dropped.sum() > 0
    assert torch.equal(recomputing.pop_dropped(), dropped)
    assert all(torch.equal(a, b) for a, b in zip(balance_step(plain).counts, balance_step(recomputing).counts, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    model = make()
    tokens, targets = batch()
    expected = model.eval()(tokens, targets).loss.item()
    model.train()
    if not autocast:
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(tokens, targets)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected, rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_rank_without_tokens_keeps_its_graph() -> None:
    for shape in [(0, 9), (2, 0)]:
        model = make(capacity_factor=1.0)
        empty = torch.zeros(shape, dtype=torch.int64)
        output = model(empty, empty)
        assert output.loss.item() == 0
        output.loss.backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        balance_step(model)


def test_dropped_assignments_per_layer() -> None:
    model = make(capacity_factor=0.5)
    model(*batch(4, 16))
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    expected = torch.stack([layer.dropped for layer in layers])
    assert (expected >= 64 * 2 - 4 * 16).all()
    assert torch.equal(model.pop_dropped(), expected)
    assert model.pop_dropped().tolist() == [0, 0]
    assert make(num_dense_layers=3).pop_dropped().shape == (0,)


def test_learns() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens, targets = batch()
    first = None
    for _ in range(25):
        loss = model(tokens, targets).loss
        loss.backward()
        balance_step(model)
        optimizer.step()
        optimizer.zero_grad()
        first = first or loss.item()
    assert loss.item() < 0.3 * first


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": torch.zeros(9, dtype=torch.int64)}, "batch, sequence"),
        ({"tokens": torch.zeros(2, 9)}, "integer ids"),
        ({"targets": torch.zeros(2, 8, dtype=torch.int64)}, "targets has shape"),
        ({"mask": torch.ones(2, 9)}, "mask has dtype"),
        ({"document_ids": torch.zeros(9, dtype=torch.int64)}, "document_ids has shape"),
        ({"tokens": torch.zeros(2, 2049, dtype=torch.int64)}, "max_seq_len=2048"),
    ],
)
def test_misfits_are_refused(kwargs: dict[str, Tensor], message: str) -> None:
    arguments = {"tokens": torch.zeros(2, 9, dtype=torch.int64), **kwargs}
    with pytest.raises(ValueError, match=message):
        make()(**arguments)
