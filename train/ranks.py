"""What several ranks do together: an error of one is an error of all, so that nobody waits for a rank that gave up."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TypeVar

from torch import distributed as dist

from .errors import first_line

T = TypeVar("T")


class RankError(RuntimeError):
    """What one of several ranks failed at; the same message on every rank."""


class Ranks:
    """The ranks of a gloo group; a single one where torch.distributed is not initialised.

    Attributes:
        group: None for a single process.
        rank, size: this process's place in the group, and how many there are.

    Args:
        group: used by nothing else at the same time. None = one that is made here, over all ranks; all have to call then.
        timeout: of the group made here; None = torch's default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group or dist.new_group(backend="gloo", timeout=timeout)
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, in rank order. Raises RankError on all of them when it raises on one.

        A single rank raises what `work` raises.
        """
        if self.group is None:
            return [work()]
        value, failure, cause = None, "", None
        try:
            value = work()
        except Exception as error:
            failure, cause = first_line(error), error
        answers: list[tuple[T, str]] = [None] * self.size  # type: ignore[list-item]
        dist.all_gather_object(answers, (value, failure), group=self.group)
        for rank, (_, failure) in enumerate(answers):
            if failure:
                raise RankError(failure if self.size == 1 else f"rank {rank}: {failure}") from cause
        return [value for value, _ in answers]

    def together(self, work: Callable[[], T]) -> T:
        """This rank's own result of `work`, which stays here; errors as in `gather`."""
        mine: list[T] = []
        self.gather(lambda: mine.append(work()))
        return mine[0]

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone does it; errors as in `gather`."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]
