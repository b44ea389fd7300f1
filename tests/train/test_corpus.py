import itertools
import json
import os
from pathlib import Path

import pytest

from evenload.train import ConfigError, load_config, load_data
from evenload.train.config import SourceConfig
from evenload.train.corpus import Source, held_out, stdlib_documents


@pytest.mark.parametrize("part", ["code", "prose"])
def test_the_stdlib_corpus_is_the_same_every_time(part: str, tmp_path: Path) -> None:
    once, again = (list(itertools.islice(stdlib_documents(part), 150)) for _ in range(2))
    assert once == again
    assert len({document.group for document in once}) == 150
    sources = [Source(SourceConfig(part, "stdlib", part), tmp_path) for _ in range(2)]
    assert sources[0].fingerprint == sources[1].fingerprint


def test_code_has_no_tests_and_no_prose_module() -> None:
    groups = [document.group for document in stdlib_documents("code")]
    assert groups == sorted(groups, key=lambda group: group.split("/"))
    assert "argparse.py" in groups
    assert not [group for group in groups if {"test", "tests", "pydoc_data", "site-packages"} & set(group.split("/"))]


def test_a_module_and_its_docstrings_share_a_split() -> None:
    """Docstrings are part of the code: one in training must not come back as validation prose."""
    code = {document.group for document in stdlib_documents("code")}
    prose = {document.group for document in itertools.islice(stdlib_documents("prose"), 200)}
    assert len(code & prose) > 50
    assert held_out("argparse.py", 0.5) == held_out("argparse.py", 0.5)


def test_the_held_out_share_is_near_what_was_asked() -> None:
    share = sum(held_out(f"document {i}", 0.1) for i in range(5000)) / 5000
    assert abs(share - 0.1) < 0.02


def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path: Path) -> None:
    import pandas

    texts = ["first document", "second\u2028document", "third"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)))
    pandas.DataFrame({"body": texts}).to_parquet(tmp_path / "a.parquet")
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    read = {
        kind: [
            document.text
            for document in Source(SourceConfig("a", kind, str(tmp_path / path), field=field), tmp_path).documents()
        ]
        for kind, path, field in [("jsonl", "a.jsonl", "body"), ("parquet", "*.parquet", "body"), ("text", "*.txt", "text")]
    }
    assert read == dict.fromkeys(read, texts)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    prints = []
    for text in ("one", "two", "one"):
        path.write_text(text)
        prints.append(Source(SourceConfig("a", "text", str(path)), tmp_path).fingerprint)
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SourceConfig("a", "text", "/nowhere/*.txt"), "no file matches '/nowhere/*.txt'"),
        (SourceConfig("a", "jsonl", "{here}/bad.jsonl"), "cannot read"),
        (SourceConfig("a", "jsonl", "{here}/good.jsonl", field="boddy"), "no column 'boddy'; columns: body"),
    ],
)
def test_what_cannot_be_read_is_named(source: SourceConfig, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    (tmp_path / "good.jsonl").write_text('{"body": "text"}\n')
    source.path = source.path.replace("{here}", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.sources: a: ") as caught:
        list(Source(source, tmp_path).documents())
    assert message in str(caught.value)


def test_a_changed_file_of_the_same_age_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("first text", "second one"):
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
        [document] = Source(SourceConfig("a", "text", str(path)), tmp_path).documents()
        assert document.text == text


def test_paths_may_be_literal_and_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_text(name)
    source = Source(SourceConfig("a", "text", "~/a[1].txt"), tmp_path)
    assert [document.text for document in source.documents()] == ["a[1].txt"]


def test_rows_without_text_are_counted_and_said(mini: str, corpus: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in (corpus / "words.txt").read_text().splitlines()]
    (tmp_path / "many.jsonl").write_text("\n".join([*lines, '{"other": "x"}', '{"text": null}']))
    sources = f"data.sources=[{{name: many, kind: jsonl, path: {tmp_path}/many.jsonl}}]"
    said: list[str] = []
    load_data(load_config(mini, [sources, f"data.cache={tmp_path}"]), said.append)
    assert "many: 2 rows without a text in 'text' were left out" in said

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"other": "x"}\n{"text": null}\n{"text": "two"}\n')
    source = Source(SourceConfig("a", "jsonl", str(tmp_path / "a.jsonl")), tmp_path)
    for _ in range(2):
        assert [document.text for document in source.documents()] == ["one", "two"]
        assert source.skipped == 2
