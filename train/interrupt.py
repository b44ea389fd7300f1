"""Ctrl-C and SIGTERM as a wish to stop, looked at between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Context in which the first SIGINT or SIGTERM is only remembered; a second one acts as usual.

    Attributes:
        caught: the signal, or None so far.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
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

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
