"""Runs many setups, side by side on as many processes as there are cores: replays share nothing."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.simulator.costs import Costs
from load_tests.simulator.figures import Figures, run_setup
from load_tests.simulator.one_replica.replay import Setup
from load_tests.simulator.trace import TraceRequest

_POLL_S = 0.1


class RunError(RuntimeError):
    """A replay broke off. One sentence."""


class Result(NamedTuple):
    """A setup, what came of it (`load_tests.simulator.figures`), and how long its replay took."""

    setup: Setup
    figures: Figures
    seconds: float


def run(
    trace: Sequence[TraceRequest],
    setups: Sequence[Setup],
    costs: Costs,
    jobs: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """Replay each setup; results come in the order of ``setups``. Raises RunError.

    ``progress`` hears how many requests have been served in all replays together, in this thread.
    """
    if min(jobs, len(setups)) == 1:
        return _run_here(trace, setups, costs, progress)
    # Spawned instead of forked: the caller may have threads, of a progress bar for one.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("Q", len(setups), lock=False)
    workers = ProcessPoolExecutor(min(jobs, len(setups)), context, _start_worker, (trace, costs, counts))
    try:
        futures = [workers.submit(_work, number, setup) for number, setup in enumerate(setups)]
        pending: set[Future[Result]] = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_POLL_S)
            progress(sum(counts))
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise RunError("A worker process was killed, perhaps for want of memory: try fewer --jobs.") from None
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


def _run_here(
    trace: Sequence[TraceRequest], setups: Sequence[Setup], costs: Costs, progress: Callable[[int], None]
) -> list[Result]:
    results: list[Result] = []
    for setup in setups:
        results.append(_guarded(trace, setup, costs, _shifted(progress, len(results) * len(trace))))
    return results


def _shifted(progress: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: progress(before + done)


_worker: dict[str, Any] = {}
"""What a worker process was started with."""


def _start_worker(trace: Sequence[TraceRequest], costs: Costs, counts: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once and without a word
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(trace=trace, costs=costs, counts=counts)


def _end_with_parent() -> None:
    """Let no worker go on for minutes after the command was killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(number: int, setup: Setup) -> Result:
    counts = _worker["counts"]
    return _guarded(_worker["trace"], setup, _worker["costs"], lambda done: counts.__setitem__(number, done))


def _guarded(trace: Sequence[TraceRequest], setup: Setup, costs: Costs, progress: Callable[[int], None]) -> Result:
    start = time.perf_counter()
    try:
        return Result(setup, run_setup(trace, setup, costs, progress), time.perf_counter() - start)
    except Exception as error:  # a policy of the user's may do anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise RunError(f"The replay of {setup.policy} broke off ({what}; {where}).") from None
