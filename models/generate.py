"""Greedy decoding of a batch of prompts.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from .cache import KVCache
from .gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end: int | None = None,
    stop: Callable[[list[int]], bool] = lambda _: False,
) -> list[list[int]]:
    """The continuation of each prompt that takes the most likely token every time.

    Every token is computed once (`KVCache`). Prompts of different lengths share a batch, with padding on the left, and rows
    that have ended are padding from then on; neither reaches an expert. Runs in eval mode; the model's mode is put back.

    Args:
        prompts: at least one token each.
        max_new_tokens: of each continuation; the longest prompt and they fit into max_seq_len.
        end: the token that ends a row; it is not returned.
        stop: asked with a row's new tokens after each of them; a row ends when it says yes.

    Raises:
        ValueError: for an empty prompt, or when prompt and continuation are longer than max_seq_len.
    """
    if not prompts or max_new_tokens < 1:
        return [[] for _ in prompts]
    if not all(prompts):
        raise ValueError("a prompt has no token; begin it with the end-of-text token, as training documents do")
    longest, device = max(map(len, prompts)), model.embedding.device
    if longest + max_new_tokens > model.config.max_seq_len:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed max_seq_len={model.config.max_seq_len}"
        )
    tokens_BS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    real_BS = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, longest - len(prompt) :] = torch.tensor(prompt)
        real_BS[row, longest - len(prompt) :] = True
    select_BS = torch.zeros_like(real_BS)
    select_BS[:, -1] = True
    cache = KVCache(longest + max_new_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        while True:
            output = model(tokens_BS.to(device), mask=real_BS.to(device), select=select_BS.to(device), cache=cache)
            chosen = output.logits.argmax(-1).cpu()
            for row, token in enumerate(chosen.tolist()):
                if not running[row]:
                    continue
                if token == end:
                    running[row] = False
                    continue
                new[row].append(token)
                running[row] = len(new[row]) < max_new_tokens and not stop(new[row])
            if not any(running):
                return new
            tokens_BS, real_BS = chosen[:, None], torch.tensor(running)[:, None]
            select_BS = torch.ones_like(real_BS)
    finally:
        model.train(was_training)
