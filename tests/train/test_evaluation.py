import math

import numpy as np
import pytest
import torch
from state import carried

from evenload.models import GPT, GPTConfig
from evenload.train import evaluate
from evenload.train.store import TokenStore
from evenload.train.tokenizer import TextTokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "naïve œuvre", "a third document, a little longer than the others"] * 5
SEQ = 16


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(iter(TEXTS), 280)


@pytest.fixture
def store(tokenizer: TextTokenizer) -> TokenStore:
    documents = [[0, *ids, 0] for ids in tokenizer.encode(TEXTS)]
    starts = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    return TokenStore("texts", np.concatenate(documents).astype(np.uint16), starts, sum(len(t.encode()) for t in TEXTS))


@pytest.fixture
def model() -> GPT:
    config = GPTConfig(vocab_size=280, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, expert_hidden=8)
    return GPT(config)


def test_bits_per_byte_of_a_uniform_model(model: GPT, store: TokenStore, tokenizer: TextTokenizer) -> None:
    """A model without a preference spends log2(vocabulary) bits on every token: count them against the bytes by hand."""
    with torch.no_grad():
        model.embedding.zero_()
    store.tokens = store.tokens[: len(store.tokens) // SEQ * SEQ + 1]  # whole sequences only
    scores = evaluate(model, [store], tokenizer, seq_len=SEQ, max_tokens=10**9, batch_size=3)
    score = scores["texts"]
    first_of_document = np.isin(np.arange(len(store.tokens)), store.starts)
    targets = np.asarray(store.tokens)[~first_of_document]
    text = tokenizer.decode(targets[targets != 0].tolist())
    assert score.text_bytes == len(text.encode())
    assert score.tokens == len(targets)
    assert score.bits_per_byte == pytest.approx(len(targets) * math.log2(280) / len(text.encode()), rel=1e-5)
    assert score.loss == pytest.approx(math.log(280), rel=1e-5)


def test_the_batch_size_does_not_matter(model: GPT, store: TokenStore, tokenizer: TextTokenizer) -> None:
    scores = [
        evaluate(model, [store], tokenizer, seq_len=SEQ, max_tokens=200, batch_size=size)["texts"].bits_per_byte
        for size in (1, 4, 100)
    ]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_nothing(model: GPT, store: TokenStore, tokenizer: TextTokenizer, training: bool) -> None:
    model.train(training)
    model(*(part[:2] for part in store.read(np.arange(2), SEQ)[:2]))  # statistics of a step under way
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *carried(model).items()]}
    generator = torch.get_rng_state()
    evaluate(model, [store], tokenizer, seq_len=SEQ, max_tokens=200, batch_size=4)
    after = dict([*model.named_parameters(), *carried(model).items()])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_stops_between_batches(model: GPT, store: TokenStore, tokenizer: TextTokenizer) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    second = TokenStore("second", store.tokens, store.starts, store.text_bytes)
    scores = evaluate(model, [store, second], tokenizer, seq_len=SEQ, max_tokens=2 * SEQ, batch_size=1, stop=stop)
    assert list(scores) == ["texts"], "two batches of the first, one of the second"
    assert len(asked) == 4
