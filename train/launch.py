"""`evenload train --nproc N`: torchrun on this machine, and what it says in a line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

MODULE = "evenload.train.cli"


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(arguments: Sequence[str], nproc: int, max_restarts: int, shutdown: float) -> tuple[int, str]:
    """Run `evenload ARGUMENTS` as `nproc` ranks under torchrun.

    Args:
        max_restarts: how often the ranks are started again after one has failed; they continue from the last checkpoint.
        shutdown: seconds that ranks have to save when they are told to stop.

    Returns the exit code, and what went wrong ("" if nothing).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # Its warnings tell of every signal that it sends; what matters is said here.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    parser = get_args_parser()
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    if "--shutdown-timeout" in parser.format_help():  # not before torch 2.12
        options.append(f"--shutdown-timeout={max(1, round(shutdown))}")
    try:
        run(parser.parse_args([*options, "-m", MODULE, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode, _failed(rank, failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval), ""
    return 0, ""


def _failed(rank: int, code: int) -> str:
    how = f"exited with code {code}" if code > 0 else f"was ended by signal {-code}"
    return f"rank {rank} {how} first, and the others were stopped; its message, if it had one, is above"
