"""A copy of the project in which one mutant after another is tried.

The copy holds what git knows and does not ignore, as the working tree has it. A mutated file has a time of its own and
gets back the old one with its old text, so that no compiled form of one text passes for the other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mutant import Mutant
from verdict_plugin import FAILURES

LIMIT_S = 300.0
"""A run that takes longer hangs: many times what any takes, for a machine may be busy."""
_BROKEN_BY = frozenset({"SyntaxError", "ImportError", "NameError"})
"""Errors of a mutant that was written badly: any test would fail, whatever it is about."""
_NOT_OURS = ("PYTEST_ADDOPTS", "CROSSKV_LONG", "PYTHONDONTWRITEBYTECODE", FAILURES)


class Verdict(StrEnum):
    """What became of a mutant."""

    RED = "red"
    SURVIVED = "survived"
    BROKEN = "broken mutant"
    """The tests could not be run, or hung where that was not foreseen. This shows nothing."""


@dataclass(frozen=True)
class Result:
    """Of one run. `said`: the test that failed first, or why there is none; `output`: the end of what was printed."""

    verdict: Verdict
    said: str
    seconds: float
    output: str


class ScratchCopy:
    """A copy of `source` in `folder`. One run at a time; `stop` may be called from any thread."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._folder = folder
        self._failures = folder.with_name(folder.name + "-failures")
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        self._runs = 0
        listed = ("git", "-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (source / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, folder / name)

    def judge(self, mutant: Mutant) -> Result:
        """Run a mutant's tests up to the first failure."""
        with self._mutated(mutant):
            return self.run(mutant.tests, "-x", may_hang=mutant.may_hang)

    def run(self, tests: Sequence[str], *options: str, may_hang: bool = False, limit_s: float = LIMIT_S) -> Result:
        """Run tests in a process of its own."""
        self._failures.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout", "0", "--hypothesis-seed", "0"]
        command += ["-p", "no:cacheprovider", "-p", "verdict_plugin", "--tb", "short", *options, *dict.fromkeys(tests)]
        began = time.monotonic()
        self._running = process = subprocess.Popen(
            command, cwd=self._folder, env=self._environment(), text=True, errors="replace", process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if self._stopped:
            self._kill()
        hung = False
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            hung = True
            self._kill()
            output, _ = process.communicate()
        finally:
            self._kill()  # what a test has left behind
            self._running = None
        seconds = time.monotonic() - began
        verdict, said = self._verdict(process.returncode, hung, may_hang)
        return Result(verdict, said, seconds, output[-4000:])

    def stop(self) -> None:
        """End the run under way, and let no other begin."""
        self._stopped = True
        self._kill()

    def failures(self) -> list[dict[str, Any]]:
        """What failed in the last run, in order."""
        if not self._failures.exists():
            return []
        return [json.loads(line) for line in self._failures.read_text().splitlines()]

    def _verdict(self, status: int, hung: bool, may_hang: bool) -> tuple[Verdict, str]:
        if hung:
            return (Verdict.RED if may_hang else Verdict.BROKEN), "hangs"
        if status == 0:
            return Verdict.SURVIVED, "every test passes"
        failures = self.failures()
        if failures:
            first = failures[0]
            if first["when"] == "collect" or _BROKEN_BY.intersection(first["errors"]):
                return Verdict.BROKEN, f"{first['errors'][0]} in {first['test']}"
            if status == 1:
                return Verdict.RED, first["test"]
        return Verdict.BROKEN, f"pytest ended with {status}"

    @contextlib.contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.file
        text, times = path.read_text(), path.stat()
        self._runs += 1
        path.write_text(mutant.applied(self._folder))
        os.utime(path, (times.st_atime, times.st_mtime + self._runs))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        places = os.pathsep.join((str(self._folder), str(self._folder / "tests" / "mutants")))
        return {**kept, "PYTHONPATH": places, FAILURES: str(self._failures)}

    def _kill(self) -> None:
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
