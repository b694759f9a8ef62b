"""One process compiles a room at a time, and none waits for good."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import compiling
from kernels.compiling import one_compiles
from load_tests.harness.patience import patience, until


def test_the_next_one_compiles_when_the_one_before_is_done_and_other_rooms_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: set[int] = set()
    alone = threading.Semaphore(1)
    went_on: list[bool] = []

    def sleep(seconds: float) -> None:
        waiting.add(threading.get_ident())
        time.sleep(seconds)

    def compile_too() -> None:
        with one_compiles("codecs"):
            went_on.append(alone.acquire(blocking=False))
            alone.release()

    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    threads = [threading.Thread(target=compile_too, daemon=True) for _ in range(3)]
    with one_compiles("codecs"):
        assert alone.acquire(blocking=False)
        for thread in threads:
            thread.start()
        with one_compiles("paged"):
            until(lambda: len(waiting) == len(threads), "they wait")
        alone.release()
    for thread in threads:
        thread.join(patience(30))
    assert went_on == [True] * len(threads)


def test_after_its_longest_wait_a_process_compiles_for_itself() -> None:
    with one_compiles("codecs"), one_compiles("codecs", longest_wait_s=0.0):
        pass


def test_where_a_file_system_has_no_locks_no_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(compiling, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
    with one_compiles("codecs"), one_compiles("codecs"):
        pass
