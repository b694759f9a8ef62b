"""`make mutants`: see README.md in this folder."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from catalogue import MUTANTS
from mutant import LostPatternError, Mutant
from scratch_copy import Result, ScratchCopy, Verdict

ROOT = Path(__file__).resolve().parents[2]
GREEN_LIMIT_S = 900.0
"""For a part of all named tests, without a mutant."""


def main() -> int:
    """Judge the mutants; 1 unless every one of them is red."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="mutants whose name or file holds this text")
    parser.add_argument("--list", action="store_true", help="print the mutants and what each would do; run nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="copies at once (all cores)")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.only or any(text in one.name + one.file for text in options.only)]
    if options.list:
        for one in chosen:
            print(f"{one.name:38}{one.file}\n    {one.harm}")
        return 0
    lost = list(_lost(chosen))
    if lost or not chosen:
        print("\n".join(lost) or "no mutant has such a name or file")
        return 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [ScratchCopy(ROOT, Path(folder) / str(number)) for number in range(max(1, options.jobs))]
        try:
            if not _is_green(copies, chosen):
                return 1
            results = list(_judged(copies, chosen))
        finally:
            for copy in copies:
                copy.stop()
    print(f"\n{len(results)} mutants, {time.monotonic() - began:.0f} s")
    alive = [(mutant, result) for mutant, result in results if result.verdict is not Verdict.RED]
    for mutant, result in alive:
        print(f"\n{result.verdict.upper()} {mutant.name} in {mutant.file}: {result.said}\n  {mutant.harm}")
        if result.verdict is Verdict.BROKEN:
            print(result.output)
    return 1 if alive else 0


def _lost(mutants: Sequence[Mutant]) -> Iterator[str]:
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
        except LostPatternError as error:
            yield str(error)


def _is_green(copies: Sequence[ScratchCopy], mutants: Sequence[Mutant]) -> bool:
    """Whether all named tests pass without a mutant; says which do not."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    most = -(-len(tests) // len(copies))
    parts = [tests[start : start + most] for start in range(0, len(tests), most)]
    began = time.monotonic()
    with ThreadPoolExecutor(len(copies)) as pool:
        runs = [pool.submit(copy.run, part, limit_s=GREEN_LIMIT_S) for copy, part in zip(copies, parts, strict=False)]
        results = [run.result() for run in runs]
    red = [result for result in results if result.verdict is not Verdict.SURVIVED]
    for result in red:
        print(f"without a mutant {result.said} fails; that has to be green first\n{result.output}")
    if not red:
        print(f"{len(tests)} tests are green without a mutant, {time.monotonic() - began:.0f} s\n", flush=True)
    return not red


def _judged(copies: Sequence[ScratchCopy], mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, Result]]:
    """Judge all, those with long tests first; print a row for each that has ended."""
    free: queue.SimpleQueue[ScratchCopy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(mutant: Mutant) -> Result:
        copy = free.get()
        try:
            return copy.judge(mutant)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = {pool.submit(judge, mutant): mutant for mutant in mutants}
        for run in as_completed(running):
            mutant, result = running[run], run.result()
            first = result.said.removeprefix("tests/") if result.verdict is Verdict.RED else result.verdict.upper()
            print(f"{mutant.name:38}{mutant.area:34}{result.seconds:6.1f} s  {first}", flush=True)
            yield mutant, result


if __name__ == "__main__":
    sys.exit(main())
