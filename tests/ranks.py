"""Runs a function on several gloo ranks: one pool of four processes serves the whole test session.

`Ranks.run(world, function, *args)` calls `function(rank, group, *args)` on the first `world` processes and returns their
results in rank order. The function must be at the top level of its file; arguments and results must pickle.
"""

import datetime
import importlib.util
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

POOL = 4
TIMEOUT = datetime.timedelta(seconds=60)


class Ranks:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        call = (world, inspect.getfile(function), function.__name__, args)
        for pipe in self._pipes:
            pipe.send(call)
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            self.stop()  # a rank that failed has left the others inside a collective: start afresh next time
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers[:world]]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(POOL):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=POOL, timeout=TIMEOUT)
    groups = {world: dist.new_group(range(world), timeout=TIMEOUT) for world in range(1, POOL + 1)}
    while True:
        try:
            world, path, name, args = pipe.recv()
        except EOFError:
            return
        try:
            value = getattr(_load(path), name)(rank, groups[world], *args) if rank < world else None
            pipe.send((True, value))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _load(path: str) -> Any:
    """Test files are not importable by name; load each once by path."""
    name = "ranks_" + path.replace("/", "_").removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
