"""The errors that end a run, and how messages come down to one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line: where, what, and what would be right."""


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message is one line that says what happened and what to do."""


class RankLost(TrainingStopped):
    """A rank ended or stopped answering."""


def close_to(word: Any, known: Sequence[str]) -> str:
    """' (did you mean ...?)' for a misspelt name; the last part of a dotted name also counts."""
    short = {name.rpartition(".")[2]: name for name in known}
    word = str(word)
    last = word.rpartition(".")[2]
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or [
        short[name] for name in difflib.get_close_matches(last, short, n=1, cutoff=0.7)
    ]
    return f" (did you mean {found[0]}?)" if found else ""


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's kind where the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
