"""What the terminal shows during a run: a bar, or plain lines where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A tqdm bar on a terminal; elsewhere one line every ten seconds, and one for the last step.

    Args:
        steps, done: of the run, in all and before this beginning.
        quiet: say nothing: one of several ranks speaks for all.
    """

    def __init__(self, steps: int, done: int, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.steps = steps
        self.first = done
        self.began = time.monotonic()
        self._spoke, self._shown = self.began, done
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet:
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, smoothing=0.1)

    def update(self, step: int, state: Sequence[str]) -> None:
        """Show the state after `step`, 1-based, in a few words each."""
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(state), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._spoke >= SECONDS_BETWEEN_LINES or step == self.steps > self._shown:
            self._spoke, self._shown = now, step
            left = (now - self.began) / max(1, step - self.first) * (self.steps - step)
            self.say("  ".join([f"step {step:,}/{self.steps:,}", *state, f"{tqdm.format_interval(left)} left"]))

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
