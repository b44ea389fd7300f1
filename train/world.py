"""The ranks of a run: how this process joins them, and the few things that they agree on."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from .errors import ConfigError, RankLost

T = TypeVar("T")
POLL = 0.5  # seconds between two looks at whether the first rank is done


@dataclass(frozen=True)
class World:
    """This process among the run's ranks. A world of one needs no process group, and every method is then free.

    Attributes:
        rank, size: of this process, among all.
        local_rank: among the processes of this machine; picks the GPU.
        timeout: seconds that a rank may leave the others waiting.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout: float = 600.0

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks, and writes the run's folder."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, on their device, in place where there is anybody to add."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest of every rank's `value`: how ranks agree to stop."""
        if self.size == 1:
            return value
        agreed = torch.tensor(value)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def from_main(self, value: T) -> T:
        """The first rank's `value`, on every rank. Only for what this library made itself: it is pickled."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def main_first(self, name: str, work: Callable[[], T]) -> T:
        """`work()`, on the first rank of each machine before the others, which then find what it has cached.

        The others wait as long as it takes; when the first rank fails its process ends, and the launcher ends theirs.
        """
        if self.size == 1:
            return work()
        store = dist.distributed_c10d._get_default_store()
        key = f"evenload/{name}/{machine()}"
        if self.local_rank == 0:
            result = work()
            store.set(key, "done")
            return result
        while not store.check([key]):
            time.sleep(POLL)
        return work()


def from_environment(timeout: float) -> World:
    """What torchrun's or SLURM's environment variables say about this process; a world of one where neither is there.

    Raises ConfigError for a part of them, or for values that cannot be.
    """
    env = os.environ
    names: tuple[str, str, str]
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return World(timeout=timeout)
    try:
        rank, size, local_rank = (int(env[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"environment: {', '.join(names)} must all be numbers; start with torchrun or srun: {error}"
        ) from error
    if not 0 <= rank < size:
        raise ConfigError(f"environment: {names[0]} = {rank} is not below {names[1]} = {size}")
    if names[0] == "SLURM_PROCID":
        _rendezvous_of_slurm()
    return World(rank, size, local_rank, timeout)


def _rendezvous_of_slurm() -> None:
    """The first machine of the job's list, and a port that follows from the job's number."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    os.environ.setdefault("MASTER_ADDR", first_machine(nodes))
    os.environ.setdefault("MASTER_PORT", str(20_000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20_000))


def first_machine(nodes: str) -> str:
    """First host of a SLURM node list: `gpu[07-09,12],cpu1` -> `gpu07`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ConfigError(f"environment: SLURM_JOB_NODELIST = {nodes!r} names no machine; set MASTER_ADDR")
    return match[1] + (match[2] or "")


def machine() -> str:
    """A name of this machine that its processes share."""
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"


@contextlib.contextmanager
def joined(world: World, device: torch.device) -> Iterator[World]:
    """Context in which the ranks' process group exists: gloo for CPU tensors, and NCCL beside it on GPUs.

    Raises RankLost in place of what a collective raises when another rank has gone or does not answer.
    """
    if world.size == 1:
        yield world
        return
    cuda = device.type == "cuda"
    timeout = datetime.timedelta(seconds=world.timeout)
    try:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            # torchrun keeps its store when it restarts the ranks, and with it the addresses of those that have ended.
            store=dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        yield world
    except RuntimeError as error:
        # The group is left alone: taking it down would wait for the rank that is gone.
        if why := lost(error):
            raise RankLost(
                f"rank {world.rank} of {world.size}: {why} within parallel.timeout = {world.timeout:g} s, or ended; its own "
                "message, if it has one, says why. The same command continues from the last checkpoint"
            ) from error
        raise
    dist.destroy_process_group()


def lost(error: RuntimeError) -> str:
    """What a failed collective says about another rank, '' for any other error."""
    text = str(error)
    signs = ("Timed out", "timed out", "Connection closed by peer", "Connection reset", "Broken pipe", "Socket Timeout")
    if isinstance(error, dist.DistError) or any(sign in text for sign in signs):
        return "another rank did not answer"
    return ""
