"""What the terminal shows while the server starts: one line per finished step, and what is under way beneath it."""

from __future__ import annotations

import json
import shlex
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from app.launch.plan import LaunchPlan


class StartProgress:
    """A context manager around the start. On a terminal the current step spins; elsewhere only finished steps print."""

    def __init__(self, console: Console) -> None:
        self._console = console
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
            self._step, self._step_started = step, now
        self._spinner.update(f"{escape(step)} {escape(detail)} [dim]{now - self._started:.0f} s[/]")

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
            self._console.print(f"[green]✓[/] {escape(self._step)} [dim]{now - self._step_started:.1f} s[/]")


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
