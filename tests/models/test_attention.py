import pytest
import torch
from torch import Tensor

from evenload.models import Attention, sequence_context
from evenload.models import attention as attention_module
from evenload.models.attention import document_numbers, packed_rows, rotary_angles, rotate, visible_keys

D, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 8


def make(**kwargs: object) -> Attention:
    return Attention(D, HEADS, KV_HEADS, WIDTH, init_std=0.3, **kwargs).double()


def attend(attention: Attention, x: Tensor, **packing: Tensor | None) -> Tensor:
    return attention(x, sequence_context(x, WIDTH, 100.0, **packing))


def by_hand(attention: Attention, x: Tensor) -> Tensor:
    """One query head, one pair of tokens at a time."""
    batch, length, _ = x.shape
    cos, sin = rotary_angles(length, WIDTH, 100.0, x.device)
    qkv = attention.qkv(x).view(batch, length, HEADS + 2 * KV_HEADS, WIDTH)
    out = torch.zeros(batch, length, HEADS, WIDTH, dtype=x.dtype)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        q = rotate(attention.q_norm(qkv[:, :, head, None]), cos, sin)[:, :, 0]
        k = rotate(attention.k_norm(qkv[:, :, HEADS + shared, None]), cos, sin)[:, :, 0]
        v = qkv[:, :, HEADS + KV_HEADS + shared]
        for i in range(length):
            scores = torch.stack([(q[:, i] * k[:, j]).sum(-1) for j in range(i + 1)], dim=-1) / WIDTH**0.5
            out[:, i, head] = (scores.softmax(-1)[..., None] * v[:, : i + 1]).sum(1)
    return attention.out(out.flatten(2))


def test_is_grouped_query_attention() -> None:
    attention, x = make(), torch.randn(2, 5, D, dtype=torch.float64)
    torch.testing.assert_close(attend(attention, x), by_hand(attention, x))


def test_rotation_depends_on_relative_position_only() -> None:
    cos, sin = rotary_angles(40, WIDTH, 100.0, torch.device("cpu"))
    q, k = torch.randn(WIDTH), torch.randn(WIDTH)
    turned_q = rotate(q.expand(1, 40, 1, WIDTH), cos, sin)[0, :, 0]
    turned_k = rotate(k.expand(1, 40, 1, WIDTH), cos, sin)[0, :, 0]
    products = turned_q @ turned_k.T
    for distance in (0, 3, 17):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[20, 17], products[20, 3])


def test_a_shifted_sequence_attends_alike() -> None:
    attention, x = make(), torch.randn(1, 6, D, dtype=torch.float64)
    shifted = torch.cat([torch.randn(1, 9, D, dtype=torch.float64), x], dim=1)
    ids = torch.tensor([[0] * 9 + [1] * 6])
    torch.testing.assert_close(attend(attention, shifted, document_ids=ids)[:, 9:], attend(attention, x), rtol=1e-5, atol=1e-6)


def test_queries_and_keys_are_normed() -> None:
    attention, x = make(norm_eps=1e-12), torch.randn(1, 6, D, dtype=torch.float64)
    before = attend(attention, x)
    with torch.no_grad():
        attention.qkv.weight[: (HEADS + KV_HEADS) * WIDTH] *= 50.0
    torch.testing.assert_close(attend(attention, x), before)


def test_sees_no_future_token_nor_other_row() -> None:
    attention = make()
    x = torch.randn(2, 6, D, dtype=torch.float64, requires_grad=True)
    out = attend(attention, x)
    (grad,) = torch.autograd.grad(out[0, 3].sum(), x)
    assert grad[0, :4].abs().amin() > 0
    assert not grad[0, 4:].any()
    assert not grad[1].any()


@pytest.mark.parametrize("ids", [[3, 3, 3, 7, 7, 7, 7], [0, 0, 1, 1, 1, 0, 0], [5, 4, 3, 3, 3, 3, 3]])
def test_documents_are_runs_of_equal_ids(ids: list[int]) -> None:
    attention, x = make(), torch.randn(1, 7, D, dtype=torch.float64)
    lengths = torch.unique_consecutive(torch.tensor(ids), return_counts=True)[1].tolist()
    apart = torch.cat([attend(attention, part) for part in x.split(lengths, dim=1)], dim=1)
    together = attend(attention, x, document_ids=torch.tensor([ids]))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("real", [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
def test_padding_is_not_seen_wherever_it_is(real: list[int]) -> None:
    attention = make()
    mask = torch.tensor([real]).bool()
    x = torch.randn(1, 6, D, dtype=torch.float64, requires_grad=True)
    out = attend(attention, x, mask=mask)
    assert out.isfinite().all()
    (grad,) = torch.autograd.grad(out[mask].sum(), x)
    assert not grad[~mask].any()
    assert grad.isfinite().all()


def test_one_document_with_padding_at_its_end_needs_no_mask() -> None:
    x = torch.zeros(2, 4, D)
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert sequence_context(x, WIDTH, 100.0).allowed is None
    assert sequence_context(x, WIDTH, 100.0, mask=right, document_ids=torch.tensor([[1] * 4, [2] * 4])).allowed is None
    assert sequence_context(x, WIDTH, 100.0, mask=right.flip(1)).allowed is not None
    assert sequence_context(x, WIDTH, 100.0, document_ids=torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2]])).allowed is not None


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    x = torch.zeros(*shape, D, dtype=torch.float64, requires_grad=True)
    out = attend(make(), x, document_ids=torch.zeros(shape, dtype=torch.int64), mask=torch.ones(shape, dtype=torch.bool))
    out.sum().backward()
    assert out.shape == x.shape


def flash_by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, most: int, most_k: int, causal: bool
) -> Tensor:
    """What flash_attn_varlen_func promises, document by document."""
    assert causal
    assert torch.equal(starts, starts_k)
    assert int(starts.diff().max()) <= most == most_k
    parts = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q_HSC, k_HSC, v_HSC = (t[begin:end].transpose(0, 1) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q_HSC, k_HSC, v_HSC, is_causal=True, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def test_the_flash_attention_path_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make(), torch.randn(2, 7, D, dtype=torch.float64)
    packing = {
        "document_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2], [2, 2, 2, 2, 2, 9, 9]]),
        "mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0]]).bool(),
    }
    expected = attend(attention, x, **packing)
    monkeypatch.setattr(attention_module, "flash_attention", lambda dtype, device: flash_by_sdpa)
    got = attend(attention, x, **packing)
    mask = packing["mask"]
    torch.testing.assert_close(got[mask], expected[mask])
    assert not got[~mask].any()
    assert not attend(attention, x, mask=torch.zeros_like(mask)).any()  # nothing but padding


def test_packed_rows() -> None:
    documents = document_numbers(2, 4, torch.tensor([[5, 5, 6, 6], [6, 6, 6, 5]]), torch.device("cpu"))
    assert documents.tolist() == [[0, 0, 1, 1], [2, 2, 2, 3]]
    packed = packed_rows(documents, torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]).bool())
    assert packed.tokens.tolist() == [0, 1, 4, 6, 7]
    assert packed.starts.tolist() == [0, 2, 4, 5]
    nothing_is_real = torch.zeros(2, 4, dtype=torch.bool)
    assert visible_keys(documents, nothing_is_real)[:, 0].int().tolist() == [torch.eye(4).int().tolist()] * 2
    assert visible_keys(documents, None)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
