from pathlib import Path

import numpy as np
import pytest

from evenload.models.loss import IGNORE
from evenload.train import ConfigError, store
from evenload.train.config import SourceConfig
from evenload.train.corpus import Source, held_out
from evenload.train.store import TokenStore, cached_store
from evenload.train.tokenizer import train_tokenizer

END = 0


def packed(documents: list[list[int]]) -> TokenStore:
    laid = [[END, *document, END] for document in documents]
    starts = np.concatenate([[0], np.cumsum([len(document) for document in laid])])
    return TokenStore("hand", np.concatenate(laid).astype(np.uint16), starts, 0)


def test_a_worked_example() -> None:
    hand = packed([[1, 2], [3], [4, 5, 6]])  # 0 1 2 0 | 0 3 0 | 0 4 5 6 0
    assert hand.sequences(5) == 2
    tokens, targets, ids = hand.read(np.array([0, 1]), 5)
    assert tokens.tolist() == [[0, 1, 2, 0, 0], [3, 0, 0, 4, 5]]
    assert targets.tolist() == [[1, 2, 0, IGNORE, 3], [0, IGNORE, 4, 5, 6]]
    assert ids.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_every_token_but_the_first_of_a_document_is_a_target_once(seq_len: int) -> None:
    chooser = np.random.default_rng(0)
    hand = packed([chooser.integers(1, 999, chooser.integers(0, 20)).tolist() for _ in range(60)])
    count = hand.sequences(seq_len)
    tokens, targets, ids = (part.flatten().numpy() for part in hand.read(np.arange(count), seq_len))
    first_of_document = np.isin(np.arange(1, count * seq_len + 1), hand.starts)
    assert (tokens == hand.tokens[: count * seq_len]).all()
    assert (targets == np.where(first_of_document, IGNORE, hand.tokens[1 : count * seq_len + 1].astype(int))).all()
    rows = ids.reshape(count, seq_len)
    assert (rows[:, 0] == 0).all()
    assert ((np.diff(rows, axis=1) == 1) == first_of_document.reshape(count, seq_len)[:, :-1]).all()


def test_documents_are_tokenised_once_and_split_without_overlap(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (corpus / "words.txt").read_text().splitlines()
    tokenizer = train_tokenizer(iter(texts), 300)

    def get() -> dict[str, TokenStore]:
        source = Source(SourceConfig("words", "text", str(corpus / "words.txt"), sample_by="line"), tmp_path)
        return cached_store(source, tokenizer, 0.2, tmp_path)

    first = get()
    monkeypatch.setattr(store, "_tokenise", lambda *_: pytest.fail("tokenised again"))
    assert (get()["training"].tokens == first["training"].tokens).all()
    for split, part in first.items():
        expected = [text for text in texts if held_out(text, 0.2) == (split == "validation")]
        bounds = zip(part.starts[:-1], part.starts[1:], strict=True)
        assert [tokenizer.decode(part.tokens[a + 1 : b - 1].tolist()) for a, b in bounds] == expected
        assert part.text_bytes == sum(len(text.encode()) for text in expected)


def test_a_large_vocabulary_takes_four_bytes(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["a b c"]), 300)
    tokenizer.size = 2**16 + 1
    source = Source(SourceConfig("words", "text", str(corpus / "words.txt"), sample_by="line"), tmp_path)
    assert cached_store(source, tokenizer, 0.2, tmp_path)["training"].tokens.dtype == np.uint32


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    source = Source(SourceConfig("one", "text", str(tmp_path / "one.txt")), tmp_path)
    with pytest.raises(ConfigError, match="none of its 1 documents fell into the validation split"):
        cached_store(source, train_tokenizer(iter(["a b c"]), 300), 0.01, tmp_path)
