"""Ctrl-C and SIGTERM: while data is prepared, and as a wish to stop that is looked at between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Context in which the first SIGINT or SIGTERM is only remembered, and answered in a line; a second one acts as usual.

    Args:
        quiet: remember it without the line.

    Attributes:
        caught: the signal, or None so far.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.caught: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._put_back()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self._put_back()
        if self.quiet:
            return
        again = "press" if number == signal.SIGINT else "send it"
        # Straight to the descriptor: the signal may have come in the middle of a print.
        with contextlib.suppress(OSError):
            os.write(2, f"\nfinishing this step, then saving; {again} again to abandon it\n".encode())

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM is a SystemExit, so that what was begun is cleaned up. Another handler is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
