import os
from collections.abc import Iterator

# Before torch is imported: results must not depend on how many cores the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from ranks import Ranks

# The same examples every time, however slow the machine is.
settings.register_profile("evenload", deadline=None, derandomize=True)
settings.load_profile("evenload")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()
