"""Four gloo ranks on this machine, started when first needed and kept for all checks.

Plain subprocesses that talk in pickles over their pipes: unlike multiprocessing's spawn they never run the caller's main
script again.
"""

import contextlib
import datetime
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from .adapter import Adapter

WORLD = 4
TIMEOUT = datetime.timedelta(seconds=60)


class RanksFailed(Exception):
    """A rank raised, or died; the message is its error."""


class RankPool:
    """`run(function, adapter, arguments)` calls function(adapter, rank, distinct, *arguments[rank]) on every rank.

    `distinct` is the group of ranks 0 and 2, or of 1 and 3: what data parallelism is when neighbours hold the same tokens.
    Use it as a context manager; nothing is started before the first `run`.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], adapter: Adapter, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results in rank order. Raises RanksFailed with the first rank's error."""
        try:
            calls = [pickle.dumps((function, adapter, own)) for own in arguments]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RanksFailed(f"the adapter cannot be sent to the ranks ({error}); define it in a module") from error
        if not self._processes:
            self._start()
        try:
            for process, call in zip(self._processes, calls, strict=True):
                _send(process.stdin, call)
            answers = [pickle.load(process.stdout) for process in self._processes if process.stdout is not None]
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.stop()
            raise RanksFailed(f"a rank died ({error})") from error
        failures = [value for ok, value in answers if not ok]
        if failures:
            self.stop()  # a rank that failed may have left the others inside a collective
            raise RanksFailed(failures[0])
        return [value for _, value in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._folder = [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for rank in range(WORLD):
            command = [sys.executable, "-P", "-c", program, str(rank), os.path.join(self._folder.name, "rendezvous")]
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
                )
            )


def serve() -> None:
    """The life of one rank: rank and rendezvous file from the command line, calls from stdin, answers to stdout."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed from here on stays out of the answers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    distinct = [dist.new_group([0, 2], timeout=TIMEOUT), dist.new_group([1, 3], timeout=TIMEOUT)][rank % 2]
    with contextlib.suppress(EOFError):
        while True:
            try:
                function, adapter, own = pickle.load(sys.stdin.buffer)
            except (AttributeError, ImportError) as error:
                _send(
                    answers, pickle.dumps((False, f"the adapter cannot be loaded on a rank ({error}); define it in a module"))
                )
                continue
            try:
                _send(answers, pickle.dumps((True, function(adapter, rank, distinct, *own))))
            except Exception as error:
                _send(answers, pickle.dumps((False, f"{type(error).__name__}: {error}")))


def _send(stream: Any, message: bytes) -> None:
    stream.write(message)
    stream.flush()
