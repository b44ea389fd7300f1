"""Our checkpoints in lm-eval: the numbers of its own `hf` model, the load by task, tasks of held-out text, the command."""

import configparser
import importlib
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenload.balancers import routers
from evenload.models import generate
from evenload.train import Trainer, cli, load_config
from evenload.train.corpus import Source, held_out
from evenload.train.export import export
from evenload.train.held_out import CHOICES, CONTEXT, continuations, held_out_texts, sample, task_names, write_tasks

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when lm-eval's libraries are imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
lm_eval_model = pytest.importorskip("evenload.train.lm_eval_model")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

ROOT = Path(__file__).parents[2]
WORDS = {
    "words": "the router sends each token to a few of many experts naïve œuvre (and) back, slowly; or not.",
    "numbers": "0 12 345 6789 + - = ( ) 3.14 1e-5",
}
LONGEST = 96


@pytest.fixture(scope="module")
def run(mini: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two sources whose documents are long enough for questions; its weights are large, so that scores differ."""
    folder = tmp_path_factory.mktemp("lm_eval")
    chooser, sources = random.Random(0), []
    for name, words in WORDS.items():
        documents = [" ".join(chooser.choices(words.split(), k=150)) for _ in range(100)]
        (folder / f"{name}.txt").write_text("\n\n".join(documents))
        sources.append({"name": name, "kind": "text", "path": str(folder / f"{name}.txt"), "sample_by": "paragraph"})
    overrides = [f"data.sources={json.dumps(sources)}", "model.balancers=[{name: eqb, space: scores}]", "model.init_std=0.3"]
    overrides += [f"model.max_seq_len={LONGEST}", f"run.out={folder}/run", "run.steps=2", "data.validation=0.2"]
    Trainer(load_config(mini, overrides), say=lambda _: None).run()
    return folder / "run"


@pytest.fixture(scope="module")
def ours(run: Path) -> Any:
    return lm_eval_model.EvenloadLM(str(run), batch_size=4, device="cpu")


@pytest.fixture(scope="module")
def theirs(run: Path) -> Any:
    folder = export(run, "hf", run.parent / "hf", say=lambda _: None)
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return


def instances(kind: str, arguments: list[tuple[Any, ...]], task: str = "task") -> list[Instance]:
    return [Instance(kind, {}, each, 0, metadata=(task, place, 1)) for place, each in enumerate(arguments)]


LONG = "the router sends each token to a few of many experts " * 8
PAIRS = [
    ("the router", " sends each token"),
    ("", "the router sends"),  # the end of a text stands for what is before
    ("to a few ", "of many experts"),  # white space goes over to the continuation
    ("12 345", " 6"),
    ("12 345", " 0"),  # choices of one token share a row
    ("12 345", " +"),
    ("12 345", " 6789 + -"),
    (LONG, " naïve œuvre"),  # longer than the model reads: cut off on the left
    ("œ", " " + LONG[:40]),
]
TEXTS = [("the router sends",), (LONG * 3,), ("naïve œuvre " * 40,), ("1",)]
GENERATIONS = [
    ("the router", {"until": ["\n"], "max_gen_toks": 12}),
    ("12 345 6789 +", {"until": ["\n"], "max_gen_toks": 12}),
    (LONG, {"until": ["\n"], "max_gen_toks": 12}),
    ("a few", {"until": ["e", "1"], "max_gen_toks": 20, "do_sample": False}),
    ("0 12 345", {"until": ["e", "1"], "max_gen_toks": 20, "do_sample": False}),
    ("naïve", {"max_gen_toks": 7}),
]


def test_log_likelihoods_are_those_of_the_export(ours: Any, theirs: Any) -> None:
    got, expected = (model.loglikelihood(instances("loglikelihood", PAIRS)) for model in (ours, theirs))
    assert [nats for nats, _ in got] == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert len({round(nats, 2) for nats, _ in got}) == len(PAIRS), "a model that always says the same would pass"


def test_a_continuation_that_is_greedy_is_seen_to_be(ours: Any, theirs: Any) -> None:
    context = ours.tok_encode("the router")
    [greedy] = generate(ours.model, [context], 3)
    other = [*greedy[:-1], greedy[-1] ^ 1]
    requests = [(("the router", str(tokens)), context, tokens) for tokens in (greedy, other, greedy[:1], greedy[:2])]
    for model in (ours, theirs):
        assert [seen for _, seen in model._loglikelihood_tokens(requests, disable_tqdm=True)] == [True, False, True, True]


def test_whole_texts_are_scored_as_by_the_export(ours: Any, theirs: Any) -> None:
    got, expected = (model.loglikelihood_rolling(instances("loglikelihood_rolling", TEXTS)) for model in (ours, theirs))
    assert max(len(ours.tok_encode(text)) for (text,) in TEXTS) > 2 * LONGEST
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-4)


def test_generations_are_those_of_the_export(ours: Any, theirs: Any) -> None:
    got, expected = (model.generate_until(instances("generate_until", GENERATIONS)) for model in (ours, theirs))
    assert got == expected
    assert len(set(got)) == len(got)
    assert all(
        term not in text for (_, options), text in zip(GENERATIONS, got, strict=True) for term in options.get("until", [])
    )


def test_neither_batch_nor_order_matter(ours: Any, run: Path) -> None:
    one = lm_eval_model.EvenloadLM(str(run), batch_size=1, device="cpu")
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", TEXTS), ("generate_until", GENERATIONS)):
        expected = getattr(one, kind)(instances(kind, arguments))
        turned = getattr(ours, kind)(instances(kind, arguments[::-1]))[::-1]
        if kind == "generate_until":
            assert turned == expected
        else:
            flat = [torch.tensor(scores, dtype=torch.float64) for scores in (turned, expected)]
            torch.testing.assert_close(*flat, rtol=1e-6, atol=1e-4)


def test_the_load_of_a_task_is_that_of_its_tokens_one_row_at_a_time(run: Path) -> None:
    lm = lm_eval_model.EvenloadLM(str(run), batch_size=4, device="cpu")
    first, second = PAIRS[:3], PAIRS[3:]
    mixed = instances("loglikelihood", first, "first") + instances("loglikelihood", second, "second")
    lm.loglikelihood(mixed[::2] + mixed[1::2])

    counts: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, routing: counts.append(routing.counts))
        for router in routers(lm.model).values()
    ]
    for task, pairs in (("first", first), ("second", second)):
        rows = set()
        for context, continuation in pairs:
            before = [lm.eot_token_id] if not context else []
            rows.add(tuple((before + lm.tok_encode(context + continuation))[-LONGEST - 1 : -1]))
        counts.clear()
        with torch.no_grad():
            for row in rows:
                lm.model(torch.tensor([row]))
        expected = torch.stack(counts).unflatten(0, (len(rows), -1)).sum(0)
        assert torch.equal(lm.load[task].counts, expected)
        summary = lm.load[task].summary()
        assert summary["tokens"] == sum(map(len, rows))
        busiest = expected.double().amax(1) / expected.double().mean(1)
        assert summary["lis"] == pytest.approx(float(busiest.mean()))
        assert summary["maxvio"] == pytest.approx(float(busiest.mean()) - 1)
        assert summary["dead"] == int((expected == 0).sum())
    for hook in hooks:
        hook.remove()


def test_the_load_of_decoding_counts_every_token_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = []
    monkeypatch.setattr(lm_eval_model, "generate", lambda *given, **also: rows.extend(generate(*given, **also)) or rows[-3:])
    lm = lm_eval_model.EvenloadLM(str(run), batch_size=4, device="cpu")
    asked = [(text, {"max_gen_toks": 5, "until": []}) for text in ("the router", "12", "a few of many experts")]
    lm.generate_until(instances("generate_until", asked, "task"))
    read = sum(len(lm.tok_encode(text)) for text, _ in asked)
    assert len(rows) == 3
    assert lm.load["task"].tokens == read + sum(min(len(row), 4) for row in rows), "the last of five is nobody's context"


def test_tasks_are_made_of_held_out_documents_alone(run: Path) -> None:
    config = load_config(str(run / "config.yaml"))
    names = task_names(config)
    assert names == ["bits_per_byte_words", "continuation_words", "bits_per_byte_numbers", "continuation_numbers"]
    folder = run.parent / "tasks"
    assert write_tasks(config, names, folder) == names
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_tasks(config, names, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first, "the same corpus, the same files"
    for settings in config.data.sources:
        documents = list(Source(settings, Path(config.data.cache or "")).documents())
        kept = {each.text for each in documents if held_out(each.group, config.data.validation)}
        assert 5 < len(kept) < len(documents) / 2
        assert {row["text"] for row in rows_of(folder, f"bits_per_byte_{settings.name}")} == kept
        questions = rows_of(folder, f"continuation_{settings.name}")
        assert len(questions) >= 20
        for row in questions:
            [home] = [text for text in kept if row["context"] + row["choices"][row["answer"]] in text]
            wrong = [choice for place, choice in enumerate(row["choices"]) if place != row["answer"]]
            assert all(any(choice in text for text in kept - {home}) for choice in wrong)
            assert len(set(row["choices"])) == CHOICES
            assert all(choice[0].isspace() and 32 <= len(choice) <= 64 for choice in row["choices"])
            assert len(row["context"]) >= CONTEXT
        assert len({row["answer"] for row in questions}) == CHOICES


def rows_of(folder: Path, task: str) -> list[dict[str, Any]]:
    [path] = folder.glob(f"{task}-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_too_few_documents_give_no_questions(tmp_path: Path) -> None:
    assert continuations(["a short text", "another"]) == []
    assert continuations(["word " * 1000]) == [], "nothing to choose from but itself"
    texts = [f"{number} " * 100 for number in range(30)]
    assert sample(reversed(texts)) == sample(texts)
    assert continuations(texts) == continuations(texts)


def test_the_command_and_the_export_side_by_side(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    assert cli.main(["eval", str(copy), "limit=6", "against=hf", "device=cpu"]) == 0
    out = capsys.readouterr().out
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    assert header[:8] == ["task", "n", "metric", "value", "± stderr", "chance", "hf", "difference"]
    assert header[8:] == ["MaxVio", "floor", "LIS", "dead experts"]
    assert [line[0] for line in lines if line[0]] == task_names(load_config(str(run / "config.yaml")))
    assert [line[5] for line in lines if line[2].startswith("acc")] == ["0.25"] * 6
    assert "log-likelihoods that differ by more than 0.0001 of their size: 0 of 108" in out
    kept = json.loads((copy / "eval" / "step-00000002.json").read_text())
    assert (kept["step"], list(kept["tasks"])) == (2, [f"{line[0]}, limit=6" for line in lines if line[0]])
    bits = kept["tasks"]["bits_per_byte_words, limit=6"]
    assert bits["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits["metrics"]["bits_per_byte"]["hf"], abs=1e-4)
    assert bits["metrics"]["bits_per_byte"]["stderr"] > 0
    assert bits["load"]["tokens"] > 0
    assert kept["tasks"]["continuation_words, limit=6"]["n"] == 6
    # Another evaluation of the same checkpoint joins them.
    assert (
        cli.main(["eval", str(copy / "checkpoints/step-00000002"), "limit=3", "tasks=[continuation_words]", "device=cpu"]) == 0
    )
    again = json.loads((copy / "eval" / "step-00000002.json").read_text())["tasks"]
    assert again == kept["tasks"] | {"continuation_words, limit=3": again["continuation_words, limit=3"]}
    assert again["continuation_words, limit=3"]["n"] == 3
    assert "| hf" not in capsys.readouterr().out


def test_bits_per_byte_is_the_evaluation_of_training(run: Path, ours: Any) -> None:
    """Documents shorter than a window are one window in both, but for where they end, which training predicts too."""
    config = load_config(str(run / "config.yaml"))
    source = Source(config.data.sources[0], Path(config.data.cache or ""))
    text = next(iter(held_out_texts(source, config.data.validation)))[:150]
    [nats] = ours.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    tokens = torch.tensor([[ours.eot_token_id, *ours.tok_encode(text)]])
    with torch.no_grad():
        output = ours.model(tokens[:, :-1], tokens[:, 1:])
    assert nats == pytest.approx(-float(output.nll_sum), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "task=x"], "eval: 'task=x': options are tasks=, batch=, limit=, device=, precision=, against="),
        (["{run}", "limit=few"], "eval: limit=few: give a number, at least 1"),
        (["{run}", "against=gguf"], "eval: against=gguf: it can be compared with hf"),
        (["{run}", "precision=fp8"], "eval: precision=fp8: use auto, fp32 or bf16"),
        (["{run}", "device=tpu"], "run.device = 'tpu': use auto, cpu, cuda or cuda:<number>"),
        (["/nowhere"], "eval: /nowhere holds no checkpoint; give a run's folder or one checkpoint of it"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *(word.format(run=run) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evenload: error: {message}")
    assert error.count("\n") == 1


def test_an_unknown_task_lists_the_runs_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_the_index(monkeypatch)
    assert cli.main(["eval", str(run), "tasks=[continuation_word]", "device=cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "eval: unknown task 'continuation_word' (did you mean continuation_words?)" in error
    assert "bits_per_byte_words, continuation_words, bits_per_byte_numbers, continuation_numbers" in error


def _without_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval without its own tasks, whose index takes long to read."""
    import lm_eval.tasks

    class WithoutTheIndex(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: str | None = None, include_defaults: bool = False, metadata: Any = None) -> None:
            super().__init__(include_path=include_path, include_defaults=False, metadata=metadata)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", WithoutTheIndex)


def test_a_request_that_the_model_cannot_serve_is_refused(ours: Any) -> None:
    def ask(kind: str, *arguments: Any) -> None:
        getattr(ours, kind)(instances(kind, [arguments]))

    with pytest.raises(ValueError, match=r"task wants 96 new tokens: this model reads 96 in all"):
        ask("generate_until", "a", {"max_gen_toks": 96})
    with pytest.raises(ValueError, match=r"task samples .* this model only decodes greedily"):
        ask("generate_until", "a", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 3})
    with pytest.raises(ValueError, match=r"a continuation of \d+ tokens in task: this model reads 96"):
        ask("loglikelihood", "a", " 1" * 200)
    with pytest.raises(ValueError, match=r"batch_size=auto: give a number"):
        lm_eval_model.EvenloadLM(ours.trained, batch_size="auto")


def test_without_a_hub_its_tasks_are_refused_at_once(run: Path, tmp_path: Path) -> None:
    tasks = run / "eval" / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    hub = "task: from_the_hub\ndataset_path: nobody/nothing\noutput_type: loglikelihood\ntest_split: test\n"
    (tasks / "hub.yaml").write_text(hub + "doc_to_text: a\ndoc_to_target: b\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "evenload.train.cli", "eval", str(run), "tasks=[from_the_hub]", "device=cpu"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if "error" in line]
    assert "eval: from_the_hub: " in line
    assert "the hub is out of reach, without it there are bits_per_byte_words, continuation_words" in line
    assert "Traceback" not in refused.stderr


def test_lm_evals_own_command_knows_us(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(load_config(str(run / "config.yaml")), ["continuation_words"], tmp_path)
    _without_the_index(monkeypatch)
    command = ["lm_eval", "--model", "evenload", "--limit", "3", "--device", "cpu", "--model_args", f"pretrained={run}"]
    command += ["--tasks", str(tmp_path / "continuation_words.yaml"), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_module("evenload.train.lm_eval", run_name="__main__")
    assert "|continuation_words|" in capsys.readouterr().out.replace(" ", "")
    [written] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["load"]["continuation_words"]["tokens"] > 0


def test_later_versions_of_lm_eval_find_it_by_its_entry_point() -> None:
    from lm_eval.api.registry import get_model

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    module, _, attribute = target.partition(":")
    assert get_model(name) is getattr(importlib.import_module(module), attribute)


def test_the_command_line_does_not_load_lm_eval() -> None:
    program = "import sys, evenload.train.cli as cli; print([m for m in ('lm_eval', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
