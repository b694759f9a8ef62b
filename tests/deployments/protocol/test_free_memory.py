"""What a process has freed is the operating system's again, although something in use lies behind it."""

from __future__ import annotations

import psutil
import pytest

from deployments.protocol.memory import glibc_trim, keep_giving_back
from load_tests.harness.patience import until

MIB = 1024**2
BLOCK, BLOCKS = 4000, 40_000
"""Above what Python keeps itself (512 bytes), below what glibc gives back at once (128 KiB)."""


def private_mib() -> float:
    return float(psutil.Process().memory_full_info().uss / MIB)


@pytest.mark.skipif(glibc_trim() is None, reason="this C library has no malloc_trim, and gives nothing back by itself")
def test_free_memory_between_blocks_in_use_is_given_back() -> None:
    blocks = [bytearray(BLOCK) for _ in range(BLOCKS)]
    kept = blocks[::200]
    del blocks
    before, given_back = private_mib(), BLOCK * BLOCKS / MIB / 2
    over = keep_giving_back(every_s=0.01)
    try:
        until(lambda: private_mib() < before - given_back, "half of what is free is given back")
    finally:
        over.set()
    assert len(kept) == BLOCKS // 200
