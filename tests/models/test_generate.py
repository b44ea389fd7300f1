"""Decoding with a cache: the same numbers as reading everything again, whatever shares the batch."""

import pytest
import torch
from torch import Tensor

from evenload.balancers import routers
from evenload.models import GPT, GPTConfig, KVCache, generate

CONFIG = GPTConfig(
    vocab_size=40,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    num_dense_layers=1,
    max_seq_len=24,
    num_experts=4,
    expert_hidden=12,
    init_std=0.3,
)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2, 3]]


@pytest.fixture
def model() -> GPT:
    return GPT(CONFIG).eval()


def greedily(model: GPT, prompt: list[int], count: int) -> list[int]:
    """By definition: read everything, take the likeliest, and again."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [7, 1, 4], [1, 11]])
@torch.no_grad()
def test_pieces_through_a_cache_equal_the_whole(model: GPT, sizes: list[int]) -> None:
    tokens = torch.randint(0, 40, (3, 12))
    cache = KVCache(12)
    logits = [model(piece, cache=cache).logits for piece in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_on_the_left_changes_no_row(model: GPT) -> None:
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[7] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in PROMPTS])
    cache = KVCache(longest + 1)
    model(tokens, mask=mask, cache=cache)
    nexts = torch.tensor([[11], [12], [13], [14]])
    got = model(nexts, cache=cache).logits[:, -1]
    for row, prompt in enumerate(PROMPTS):
        alone = model(torch.tensor([[*prompt, int(nexts[row])]])).logits[0, -1]
        torch.testing.assert_close(got[row], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_of_selected_positions(model: GPT) -> None:
    tokens, select = torch.randint(0, 40, (2, 6)), torch.zeros(2, 6, dtype=torch.bool)
    select[0, 2] = select[0, 5] = select[1, 0] = True
    logits = model(tokens).logits
    got = model(tokens, select=select).logits
    torch.testing.assert_close(got, torch.stack([logits[0, 2], logits[0, 5], logits[1, 0]]))


def test_a_batch_is_its_prompts_one_by_one(model: GPT) -> None:
    expected = [greedily(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1, "a model that always says the same would pass"
    assert generate(model, PROMPTS, 8) == expected
    assert generate(model, PROMPTS[::-1], 8) == expected[::-1]
    assert [generate(model, [prompt], 8)[0] for prompt in PROMPTS] == expected


def test_rows_end_by_themselves(model: GPT) -> None:
    expected = [greedily(model, prompt, 8) for prompt in PROMPTS]
    end = expected[0][3]
    shortened = [row[: row.index(end)] if end in row else row for row in expected]
    assert generate(model, PROMPTS, 8, end=end) == shortened
    at = expected[2][1]
    stopped = [row[: row.index(at) + 1] if at in row else row for row in expected]
    assert generate(model, PROMPTS, 8, stop=lambda new: new[-1] == at) == stopped


def test_each_real_token_is_routed_once(model: GPT) -> None:
    end = greedily(model, PROMPTS[0], 3)[2]
    counts: list[Tensor] = []
    for router in routers(model).values():
        router.register_forward_hook(lambda _, __, routing: counts.append(routing.counts))
    new = generate(model, PROMPTS, 5, end=end)
    # The last token of a row is nobody's context.
    read = sum(len(prompt) for prompt in PROMPTS) + sum(len(row) - (len(row) == 5) for row in new)
    layers = CONFIG.num_layers - CONFIG.num_dense_layers
    assert len(new[0]) < 5
    assert int(torch.stack(counts).sum()) == read * CONFIG.top_k * layers


def test_the_mode_is_put_back(model: GPT) -> None:
    model.train()
    generate(model, [[1]], 2)
    assert model.training


def test_what_does_not_fit_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="a prompt of 5 tokens and 20 new ones exceed max_seq_len=24"):
        generate(model, [[1] * 5], 20)
    with pytest.raises(ValueError, match="a prompt has no token"):
        generate(model, [[1], []], 2)
    cache = KVCache(4)
    model(torch.ones(2, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="2 tokens after 3 are more than the cache's length=4"):
        model(torch.ones(2, 2, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="the cache has read 2 rows, tokens have 1"):
        model(torch.ones(1, 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="leave document_ids out"):
        model(torch.ones(2, 1, dtype=torch.int64), document_ids=torch.zeros(2, 1), cache=cache)
    with pytest.raises(ValueError, match="select has dtype"):
        model(torch.ones(2, 1, dtype=torch.int64), select=torch.ones(2, 1, dtype=torch.int64))
