"""Runs a function on several gloo ranks; the processes serve the whole test session.

`Ranks.run(world, function, *args)` calls `function(rank, group, *args)` on `world` processes, which are all the ranks there
are (`group` is torch's default group), and returns their results in rank order. The function must be at the top level of its
file; arguments and results must pickle.
"""

import datetime
import importlib.util
import inspect
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=60)
GROUPS = 60  # process groups that calls may leave behind: gloo's threads of each look for messages for ever


class Ranks:
    """One set of processes for each number of ranks, started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if world not in self._worlds:
            self._worlds[world] = World(world)
        answers = self._worlds[world].ask((inspect.getfile(function), function.__name__, args))
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value, _) in enumerate(answers) if not ok]
        # A rank that failed has left the others inside a collective.
        if failures or max(groups for _, _, groups in answers) > GROUPS:
            self._worlds.pop(world).stop()
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value, _ in answers]

    def stop(self) -> None:
        while self._worlds:
            self._worlds.popitem()[1].stop()


class World:
    """Processes that wait for calls."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self._folder.name}/meeting", theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, call: tuple[Any, ...]) -> list[tuple[bool, Any, int]]:
        for pipe in self._pipes:
            pipe.send(call)
        return [pipe.recv() for pipe in self._pipes]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, meeting: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=TIMEOUT)
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:
            return
        try:
            value, ok = getattr(_load(path), name)(rank, dist.group.WORLD, *args), True
        except Exception:
            value, ok = traceback.format_exc(), False
        pipe.send((ok, value, len(dist.distributed_c10d._world.pg_map)))


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
