"""Our checkpoints as a model of lm-evaluation-harness, under the name `evenload`.

Requests are scored as its own `hf` model scores them, so that a run and its `evenload export RUN hf` get the same numbers.
A batch never mixes tasks, which is what lets the load of the experts be told apart by task.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from ..models import generate
from .errors import ConfigError
from .evaluation import watched_load
from .runtime import choose_autocast, choose_device
from .task_load import TaskLoad
from .trained import Trained, load_trained


class Span(NamedTuple):
    """Tokens of which the last `scored` are predicted, each from all before it."""

    tokens: list[int]
    scored: int


@register_model("evenload")
class EvenloadLM(TemplateLM):
    """A run of `evenload train` in lm-eval.

    Args:
        pretrained: a run's folder, whose newest checkpoint is taken, one checkpoint, or what `load_trained` made of them.
        batch_size: rows per forward.
        max_length: tokens that a row may have; None = the model's max_seq_len.
        device: auto, cpu, cuda or cuda:<number>, unless it is loaded already.
        precision: fp32, which is what an export has; bf16 is autocast; auto as in run.precision.
        max_batch_size: no use is made of it; lm-eval's command line passes it on.

    Attributes:
        load: what the routers did, by task.

    Raises:
        ConfigError, CheckpointError: for what cannot be loaded or is not understood.
    """

    def __init__(
        self,
        pretrained: str | Trained,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str | None = "auto",
        precision: str = "fp32",
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ConfigError(f"eval: batch_size={batch_size}: give a number of rows, at least 1")
        if precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"eval: precision={precision}: use auto, fp32 or bf16")
        self.batch_size = int(batch_size)
        if not isinstance(pretrained, Trained):
            pretrained = load_trained(Path(pretrained), choose_device(device or "auto"))
        self.trained = pretrained
        self.model = self.trained.model
        self._device = self.model.embedding.device
        self.autocast = choose_autocast(precision, self._device)
        longest = self.model.config.max_seq_len
        self.max_length = longest if max_length is None else int(max_length)
        if not 1 <= self.max_length <= longest:
            raise ConfigError(f"eval: max_length={max_length}: this model reads 1 to {longest} tokens")
        self.load: dict[str, TaskLoad] = {}
        self._doing = ""  # the task whose requests are being answered

    @property
    def eot_token_id(self) -> int:
        return self.trained.tokenizer.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Text is text: one that spells the end-of-text token does not become it, in training neither."""
        return self.trained.tokenizer.encode([string])[0]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(nats of the continuation given the context, whether greedy decoding would give it), per request."""
        return self._by_task(requests, lambda part: super(EvenloadLM, self).loglikelihood(part, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Nats of each whole text, in windows that predict every token once, the first of them from the end-of-text token."""
        return self._by_task(requests, self._rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, up to a stop sequence or the end of the text."""
        return self._by_task(requests, self._generate)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval adds to its results: where the model comes from, and the load of its experts by task."""
        load = {task: load.summary() for task, load in self.load.items()}
        return {"checkpoint": str(self.trained.checkpoint), "step": self.trained.step, "load": load}

    def _by_task(self, requests: Sequence[Instance], run: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        """The answers of `run`, in the order of the requests, with the load of every task watched by itself."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_name or "", []).append(place)
        answers: list[Any] = [None] * len(requests)
        for task, own in places.items():
            self._doing = task
            with self._watched(task):
                for place, answer in zip(own, run([requests[place] for place in own]), strict=True):
                    answers[place] = answer
        return answers

    @contextlib.contextmanager
    def _watched(self, task: str) -> Iterator[None]:
        with watched_load(self.model) as counts:
            yield
        total = torch.stack(counts).cpu()
        if task in self.load:  # a task with requests of two kinds
            total += self.load[task].counts
        self.load[task] = TaskLoad(total, self.model.config.top_k)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._score([self._span(context, continuation) for _, context, continuation in requests], "loglikelihood")
        for (text, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, score)
        return scores

    def _rolling(self, requests: list[Instance]) -> list[float]:
        spans, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                spans.append(self._span(*make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, self._score(spans, "loglikelihood_rolling"), strict=True):
            totals[number] += nats
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _span(self, context: list[int], continuation: list[int]) -> Span:
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"eval: a continuation of {len(continuation)} tokens in {self._doing}: this model reads {self.max_length}"
            )
        # The last token is only predicted, so one more than the model reads; what does not fit is cut off on the left.
        return Span((context + continuation)[-(self.max_length + 1) :], len(continuation))

    @torch.no_grad()
    def _score(self, spans: Sequence[Span], kind: str) -> list[tuple[float, bool]]:
        """(nats, greedy) of every span. Spans that read the same tokens, such as one-token choices, share a row."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for place, span in enumerate(spans):
            if span.scored:
                sharing.setdefault(tuple(span.tokens[:-1]), []).append(place)
        rows = sorted(sharing, key=lambda read: (-len(read), read))  # equal lengths together; what needs most memory first
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(spans)
        with self._progress(sum(map(len, sharing.values())), kind) as bar:
            for first in range(0, len(rows), self.batch_size):
                batch = rows[first : first + self.batch_size]
                wanted = [max(spans[place].scored for place in sharing[read]) for read in batch]
                for read, logp_SV in zip(batch, self._log_probabilities(batch, wanted), strict=True):
                    for place in sharing[read]:
                        scores[place] = _score_of(logp_SV, spans[place])
                    bar.update(len(sharing[read]))
        return scores

    def _log_probabilities(self, rows: Sequence[tuple[int, ...]], wanted: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Log-probabilities (wanted, V) float32 of what follows the last `wanted` tokens of each row."""
        longest = max(map(len, rows))
        tokens_BS = torch.zeros(len(rows), longest, dtype=torch.int64)
        real_BS, select_BS = (torch.zeros(len(rows), longest, dtype=torch.bool) for _ in range(2))
        for row, (read, count) in enumerate(zip(rows, wanted, strict=True)):
            tokens_BS[row, : len(read)] = torch.tensor(read)
            real_BS[row, : len(read)] = True
            select_BS[row, len(read) - count : len(read)] = True
        with self._casting():
            output = self.model(tokens_BS.to(self._device), mask=real_BS.to(self._device), select=select_BS.to(self._device))
        return output.logits.float().log_softmax(-1).cpu().split(list(wanted))

    def _generate(self, requests: list[Instance]) -> list[str]:
        texts = [""] * len(requests)
        asked: dict[tuple[Any, ...], list[int]] = {}
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            if options["do_sample"]:
                raise ConfigError(f"eval: {self._doing} samples ({request.args[1]}), and this model only decodes greedily")
            end = self.trained.tokenizer.tokenizer.id_to_token(self.eot_token_id)
            until = handle_stop_sequences(options["until"], eos=end)
            asked.setdefault((options["max_gen_toks"], *until), []).append(number)
        with self._progress(len(requests), "generate_until") as bar:
            for (new, *until), numbers in asked.items():
                if new >= self.max_length:
                    raise ConfigError(f"eval: {self._doing} wants {new} new tokens: this model reads {self.max_length} in all")
                prompts = {number: self._prompt(requests[number].args[0], self.max_length - new) for number in numbers}
                order = sorted(prompts, key=lambda number: (-len(prompts[number]), prompts[number]))
                for first in range(0, len(order), self.batch_size):
                    batch = order[first : first + self.batch_size]
                    for number, text in zip(batch, self._continue([prompts[n] for n in batch], new, until), strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return texts

    def _prompt(self, text: str, length: int) -> list[int]:
        return self.tok_encode(text)[-length:] or [self.prefix_token_id]

    def _continue(self, prompts: list[list[int]], new: int, until: list[str]) -> list[str]:
        decode = self.trained.tokenizer.decode
        with self._casting():
            rows = generate(
                self.model,
                prompts,
                new,
                end=self.eot_token_id,
                stop=lambda tokens: any(term in decode(tokens) for term in until if term),
            )
        return [postprocess_generated_text(decode(row), until, None) for row in rows]

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=self.autocast) if self.autocast else contextlib.nullcontext()

    def _progress(self, total: int, kind: str) -> tqdm:
        return tqdm(total=total, desc=f"{self._doing}: {kind}", unit="request", dynamic_ncols=True, mininterval=1.0)


def _score_of(logp_SV: torch.Tensor, span: Span) -> tuple[float, bool]:
    targets_S = torch.tensor(span.tokens[-span.scored :])
    own_SV = logp_SV[-span.scored :]
    nats = own_SV.gather(-1, targets_S[:, None]).sum()
    return float(nats), bool((own_SV.argmax(-1) == targets_S).all())
