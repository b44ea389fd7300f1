"""A corpus of two domains that takes no time, and a configuration for it that trains in a second."""

import random
from pathlib import Path
from textwrap import dedent

import pytest


def _lines(words: str, seed: int, count: int) -> str:
    chooser = random.Random(seed)
    return "".join(" ".join(chooser.choices(words.split(), k=chooser.randint(5, 60))) + "\n" for _ in range(count))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "words.txt").write_text(_lines("the router sends each token to a few of many experts naïve œuvre", 1, 200))
    (folder / "numbers.txt").write_text(_lines("0 12 345 6789 + - = ( ) 3.14 1e-5", 2, 200))
    return folder


@pytest.fixture(scope="session")
def mini(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a miniature configuration; its caches are shared by the session."""
    folder = tmp_path_factory.mktemp("mini")
    text = f"""\
    model:
      vocab_size: 300
      d_model: 16
      num_layers: 2
      num_heads: 2
      num_kv_heads: 1
      max_seq_len: 64
      num_experts: 4
      top_k: 2
      expert_hidden: 16
    data:
      sources:
        - {{name: words, kind: text, path: "{corpus}/words.txt", sample_by: line}}
        - {{name: numbers, kind: text, path: "{corpus}/numbers.txt", sample_by: line}}
      validation: 0.1
      cache: "{folder}/cache"
    optim: {{lr: 1e-2}}
    schedule: {{warmup: 2}}
    run:
      steps: 8
      seq_len: 32
      batch: 4
      microbatch: 2
      eval_every: 0
      eval_tokens: 256
      save_every: 4
      image_every: 4
    """
    path = folder / "mini.yaml"
    path.write_text(dedent(text))
    return str(path)
