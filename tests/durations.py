"""How long each file of tests took, and what it starts: `--store-durations` writes it, `handing_out.py` reads it.

A plugin of both kinds of process: a worker hands over what it has started and left out, and the process that pytest was
started as adds up.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from configs.model_folder import PROJECT_ROOT

STORED = Path(__file__).with_name("durations.json")
SLOWEST_SHOWN = 5
SHORTEST_STORED_S = 0.05
"""Tests that took less have no entry of their own; their file's has them."""
FIXTURES = {"whole_server": "server", "one_engine": "engine", "one_ray": "ray"}
"""What a test needs, by the fixture that starts it. A session starts each as seldom as it can."""


@dataclass(frozen=True)
class Start:
    """A Ray, an engine or a server that a test has waited for."""

    kind: str
    name: str
    seconds: float


@dataclass
class FileDurations:
    """Seconds of a file, over all phases of its tests; of each test that took some; and what the file needs."""

    seconds: float = 0.0
    needs: list[str] = field(default_factory=list)
    tests: dict[str, float] = field(default_factory=dict)


_starts: list[Start] = []


@contextmanager
def timed_start(kind: str, name: str) -> Iterator[None]:
    """Note how long this process waits for the start of a `ray`, an `engine`, an `engine process` or a `server`."""
    began = time.monotonic()
    yield
    _starts.append(Start(kind, name, round(time.monotonic() - began, 2)))


def stored() -> dict[str, FileDurations]:
    """By file; empty where nothing is stored."""
    if not STORED.exists():
        return {}
    return {name: FileDurations(**one) for name, one in json.loads(STORED.read_text())["files"].items()}


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


class Durations:
    """Adds up what the workers report, shows it at the end, and stores it if asked."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: defaultdict[str, FileDurations] = defaultdict(FileDurations)
        self._workers: Counter[str] = Counter()
        self._starts: list[Start] = []
        self._needs: dict[str, list[str]] = {}
        self._left_out: dict[str, list[str]] = {}

    def hand_over(self, output: dict[str, Any]) -> None:
        """Take what a process has started, what its files need, and what it was told to leave out."""
        self._starts += [Start(**one) for one in output["starts"]]
        self._needs |= output["needs"]
        self._left_out |= output["left_out"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        one = self._files[file_of(report.nodeid)]
        test = report.nodeid.partition("::")[2]
        one.seconds += report.duration
        one.tests[test] = one.tests.get(test, 0.0) + report.duration
        self._workers[getattr(report, "worker_id", "this process")] += report.duration  # type: ignore[assignment]
        if report.failed:
            self._name_at_once(report)

    def _name_at_once(self, report: pytest.TestReport) -> None:
        """A run that is stopped shows no summary."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"{report.when} failed: {report.nodeid}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; one that crashed hands nothing over."""
        if "starts" in getattr(node, "workeroutput", {}):
            self.hand_over(node.workeroutput)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Store what was run; of files that were not, what is stored stays."""
        if not self._config.getoption("store_durations"):
            return
        ran = {name: self._rounded(name, one) for name, one in self._files.items()}
        files = {name: one for name, one in (stored() | ran).items() if (PROJECT_ROOT / name).exists()}
        workers = {name: round(seconds, 1) for name, seconds in sorted(self._workers.items())}
        starts = sorted(self._starts, key=lambda start: (start.kind, -start.seconds))
        told = {"workers": workers, "starts": list(map(asdict, starts))}
        told["files"] = {name: asdict(one) for name, one in sorted(files.items())}
        STORED.write_text(json.dumps(told, indent=1) + "\n")

    def _rounded(self, name: str, one: FileDurations) -> FileDurations:
        tests = {test: round(seconds, 2) for test, seconds in one.tests.items() if seconds >= SHORTEST_STORED_S}
        return FileDurations(round(one.seconds, 2), self._needs.get(name, []), tests)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was left out and why, what was started, how busy each worker was, and the slowest files."""
        show = terminalreporter.write_line
        if self._left_out:
            terminalreporter.section("left out, for `make test-long`, each above the test that holds its claim")
            for name, holders in sorted(self._left_out.items()):
                show(f"{name}\n    {', '.join(holders)}")
        terminalreporter.section("time")
        for kind, number in sorted(Counter(start.kind for start in self._starts).items()):
            seconds = [start.seconds for start in self._starts if start.kind == kind]
            show(f"{number} starts of a{'n' * (kind[0] == 'e')} {kind}, {sum(seconds):.0f} s")
        show("workers: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(self._workers.items())))
        slowest = sorted(self._files.items(), key=lambda pair: -pair[1].seconds)[:SLOWEST_SHOWN]
        for name, one in slowest:
            show(f"{one.seconds:7.1f} s  {name}, {len(one.tests)} tests")


def needs_of(items: Sequence[pytest.Function]) -> dict[str, list[str]]:
    """Of each file what any of its tests needs, if anything."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        for fixture in FIXTURES.keys() & set(item.fixturenames):
            found[file_of(item.nodeid)].add(FIXTURES[fixture])
    return {name: sorted(needs) for name, needs in found.items()}


def left_out_of(items: Sequence[pytest.Function]) -> dict[str, list[str]]:
    """By test, without its parameters, the tests that hold its claim in this run."""
    found: dict[str, list[str]] = {}
    for item in items:
        names = [str(mark.args[0]) for mark in item.iter_markers("long")]
        found[item.nodeid.partition("[")[0]] = sorted(set(names))
    return found


def handed_over(needs: dict[str, list[str]], left_out: dict[str, list[str]]) -> dict[str, Any]:
    """What a process tells at its end, as JSON's types."""
    return {"starts": [asdict(start) for start in _starts], "needs": needs, "left_out": left_out}
