"""What is seen of a start: its steps on the terminal, what is under way beneath them, and that it cannot end well."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from app.launch.plan import LaunchPlan

_FAILED_STATUSES = ("DEPLOY_FAILED", "UNHEALTHY")

_TOLD_EVERY_S = 30.0
"""Off a terminal, where nothing spins: how often a step that goes on is said to."""
_LAST_START = "start.json"
"""In the run folder: by step, how many seconds it took last time."""
_NOBODY_S = 60.0
"""As long as Ray waits for a worker that it has started."""
_FAILED = re.compile(r"A (replica|deployment actor) failed to start")
"""How Serve's message begins while it tries again."""


class StartProgress:
    """A context manager around the start. On a terminal the current step spins; elsewhere finished steps print, and
    now and then what goes on. `last`: seconds by step, of the start before."""

    def __init__(self, console: Console, last: Mapping[str, float] | None = None) -> None:
        self._console = console
        self._last = last or {}
        self._told = 0.0
        self.took: dict[str, float] = {}
        self._spinner = console.status("")
        self._started = self._step_started = time.monotonic()
        self._step = ""

    def __enter__(self) -> StartProgress:
        self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()

    def at(self, step: str, detail: str = "") -> None:
        """Say what is under way; a new step finishes the one before."""
        now = time.monotonic()
        if step != self._step:
            self._finish(now)
            self._step, self._step_started, self._told = step, now, now
        usual = f", last time {self._last[step]:.0f} s" if step in self._last else ""
        self._spinner.update(f"{escape(step)} {escape(detail)} [dim]{now - self._started:.0f} s{usual}[/]")
        if not self._console.is_terminal and now - self._told >= _TOLD_EVERY_S:
            self._told = now
            self._console.print(
                f"… {step}{detail and f' ({detail})'}: {now - self._step_started:.0f} s{usual}", markup=False
            )

    def done(self) -> float:
        """Finish the last step.

        Returns:
            Seconds since the start.
        """
        now = time.monotonic()
        self._finish(now)
        self._step = ""
        return now - self._started

    def _finish(self, now: float) -> None:
        if self._step:
            self.took[self._step] = self.took.get(self._step, 0.0) + now - self._step_started
            self._console.print(f"[green]✓[/] {escape(self._step)} [dim]{now - self._step_started:.1f} s[/]")


class StartWatch:
    """Whether a start can still end well, by what Serve and Ray say of it. Use once, from one thread.

    Serve tries a part three times for each replica and for ever where its processes die before they are its own, a
    minute or two each time. A part that fails twice in the same words will fail again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._failures: dict[str, list[str]] = {}

    def cause(self, status: Mapping[str, Any], dead_workers: Callable[[], list[str]]) -> str | None:
        """Why it cannot, in the part's own last line; None while it may. `dead_workers`: last lines of processes that
        Ray has started and that ended before they could be used."""
        parts: Mapping[str, Mapping[str, Any]] = status.get("deployments") or {}
        if status.get("status") in _FAILED_STATUSES:
            return cause_in([status["message"], *(part["message"] for part in parts.values())])
        for name, part in parts.items():
            seen = self._failures.setdefault(name, [])
            if not _FAILED.match(part["message"]) or part["message"] in seen[-1:]:
                continue
            seen.append(part["message"])
            causes = [cause_in([message]) for message in seen[-2:]]
            if "SettingsError" in part["message"] or (len(causes) > 1 and causes[0] == causes[1]):
                return f"{name}: {causes[-1]}"
        if not parts and self._clock() - self._began > _NOBODY_S and (dead := dead_workers()):
            return f"Ray's processes end as soon as they are started: {dead[-1]}"
        return None


def cause_in(messages: Sequence[str]) -> str:
    """The line that says what went wrong: a settings error's own sentence, or the last line of the last traceback."""
    for message in messages:
        found = re.search(r"SettingsError\S*: (.+)", message)
        if found:
            return found[1].strip()
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Exit)\b", line)]
    return (errors or lines or ["Serve gave no reason."])[-1]


def last_start(folder: Path) -> dict[str, float]:
    """How many seconds each step took when the server of this run folder last became ready; empty where unknown."""
    try:
        found = json.loads((folder / _LAST_START).read_text(encoding="utf-8"))
        return {str(step): float(seconds) for step, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def note_start(folder: Path, took: Mapping[str, float]) -> None:
    """Keep it for the next start; a folder that takes nothing is no reason to fail."""
    with contextlib.suppress(OSError):
        (folder / _LAST_START).write_text(json.dumps(took), encoding="utf-8")


def describe(status: dict[str, Any]) -> tuple[str, str]:
    """The step that a status of `serve_run` means, and its detail, such as `Replica 1/2`."""
    if status["phase"] == "start":
        return "starting Ray", ""
    if status["phase"] != "app" or not status["deployments"]:
        return "starting Serve and building the application", ""
    parts = [f"{name} {d['running']}/{d['target']}" for name, d in status["deployments"].items() if d["target"]]
    return "loading the model", " · ".join(parts)


def ready_text(plan: LaunchPlan, seconds: float, on_terminal: bool) -> str:
    """The address, and a request that can be pasted into a shell; off a terminal, where it is kept, without a key."""
    body = {
        "model": plan.settings.model_name,
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 64,
    }
    http = plan.settings.http
    known = (http.plain_key if on_terminal else None) or ("YOUR_KEY" if http.tenants else None)
    key = f" -H {shlex.quote(f'Authorization: Bearer {known}')}" if known else ""
    return (
        f"crosskv serves {plan.settings.model_name} at {plan.address} (ready after {seconds:.0f} s)\n"
        f"It computes in {plan.settings.dtype_said}.\n\n"
        f"curl -sN {plan.address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body))}\n\n"
        f"Ctrl-C stops it, SIGHUP restarts it. Log: {plan.run_folder / 'server.log'}"
    )
