from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from evenload.train import ConfigError
from evenload.train.config import SourceConfig
from evenload.train.corpus import Source
from evenload.train.tokenizer import END_OF_TEXT, TextTokenizer, cached_tokenizer, load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "naïve œuvre 北京 🙂", "\n\tdef f(x):\n\t\treturn x  # tab\n", "\x00\x7f\u2028", END_OF_TEXT]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(iter(["the cat sat on the mat and the cat", "naïve œuvre"] * 10), 280)


def test_every_text_survives_and_its_bytes_are_counted(tokenizer: TextTokenizer) -> None:
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())
        assert tokenizer.end_of_text not in ids, "text must not be able to forge the end of a document"


def test_training_twice_gives_the_same_tokenizer(tokenizer: TextTokenizer) -> None:
    again = train_tokenizer(iter(["the cat sat on the mat and the cat", "naïve œuvre"] * 10), 280)
    assert again.to_json() == tokenizer.to_json()
    assert tokenizer.size == 280
    assert tokenizer.bytes_per_token[tokenizer.end_of_text] == 0


def test_it_is_trained_once_per_corpus_and_size(corpus: Path, tmp_path: Path) -> None:
    def get(size: int, path: Path) -> tuple[TextTokenizer, bool]:
        source = Source(SourceConfig("a", "text", str(path), sample_by="line"), tmp_path)
        return cached_tokenizer([source], size, 10_000, 0.1, tmp_path)

    first, trained = get(300, corpus / "words.txt")
    second, trained_again = get(300, corpus / "words.txt")
    assert (trained, trained_again) == (True, False)
    assert first.to_json() == second.to_json()
    assert get(290, corpus / "words.txt")[1]
    assert get(300, corpus / "numbers.txt")[1]


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words = Tokenizer(models.WordLevel({"人": 0, END_OF_TEXT: 1}, unk_token="人"))
    words.save(str(path))
    with pytest.raises(ConfigError, match="is not byte-level"):
        load_tokenizer(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(str(path))


def test_truncation_and_padding_of_a_file_are_switched_off(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    cut = Tokenizer.from_str(tokenizer.to_json())
    cut.enable_truncation(4)
    cut.enable_padding(length=9)
    cut.save(str(tmp_path / "cut.json"))
    assert load_tokenizer(str(tmp_path / "cut.json")).encode(TEXTS) == tokenizer.encode(TEXTS)


def test_what_only_looks_byte_level_is_refused(tokenizer: TextTokenizer) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "UNK": 2, END_OF_TEXT: 3}, unk_token="UNK"))
    words.add_special_tokens([END_OF_TEXT])
    with pytest.raises(ConfigError, match="not byte-level: 256 of the 256 bytes have no token"):
        TextTokenizer(words, "words")

    def changed(**parts: object) -> Tokenizer:
        other = Tokenizer.from_str(tokenizer.to_json())
        for name, part in parts.items():
            setattr(other, name, part)
        return other

    with pytest.raises(ConfigError, match="a normalizer changes the text"):
        TextTokenizer(changed(normalizer=normalizers.Lowercase()), "lower")
    with pytest.raises(ConfigError, match="it has no ByteLevel pre-tokenizer"):
        TextTokenizer(changed(pre_tokenizer=pre_tokenizers.Whitespace()), "white")
    nested = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert TextTokenizer(changed(pre_tokenizer=nested), "nested").size == tokenizer.size
