"""One life of the server, from its start to the end of all its processes: what happens, and what the terminal says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from app.launch.plan import LaunchPlan
from app.launch.progress import StartProgress, StartWatch, describe, last_start, note_start, ready_text
from app.launch.readiness import Readiness
from app.launch.run_folder import launched_from_here
from app.launch.server import Server
from app.launch.signals import Signals
from configs.settings import SettingsError

_POLL_S = 0.25
_SETTLE_POLLS = 12
"""/health is read so often until all parts are well: what it says is up to a second old."""
_INDEXING_S = 30.0
"""A Redis that takes longer to read is not waited for."""


class ServerError(Exception):
    """The server cannot start, or has ended by itself. `str()` of it is for a person."""


class Life:
    """Use once, from the main thread. `read_again` makes the next plan of this one's, or raises SettingsError."""

    def __init__(
        self,
        plan: LaunchPlan,
        signals: Signals,
        read_again: Callable[[LaunchPlan], LaunchPlan],
        out: Console,
        err: Console,
    ) -> None:
        self._plan = plan
        self._signals = signals
        self._read_again = read_again
        self._out = out
        self._err = err
        self._server = Server(plan)
        self._readiness = Readiness(plan)
        self._following: LaunchPlan | None = None

    def run(self) -> LaunchPlan | None:
        """Start, serve until a stop or a restart is asked for, and end everything.

        Returns:
            The next life's plan after a restart was asked for; None after a stop.

        Raises:
            ServerError: the server failed; its message was printed, and everything was ended.
        """
        with launched_from_here(self._plan.port), contextlib.closing(self._readiness):
            for warning in self._plan.warnings:
                self._err.print(warning, markup=False)
            try:
                self._server.start()
                if self._wait_until_ready():
                    self._warn()
                    while not self._is_over():
                        pass
            except ServerError as failure:
                self._err.print(str(failure), markup=False)
                raise
            finally:
                self._stop()
        return None if self._signals.wait_for_stop(0) else self._following

    def _is_over(self) -> bool:
        """Whether a stop, or a restart that can work, was asked for; known after `_POLL_S`."""
        if self._signals.wait_for_stop(_POLL_S):
            return True
        if self._signals.take_restart():
            try:
                self._following = self._read_again(self._plan)
            except SettingsError as error:
                self._err.print(
                    f"{error}\nNot restarted: the server goes on with the settings that it has.", markup=False
                )
        self._server.look()
        if self._server.exit_code is not None:
            if self._signals.wait_for_stop(_POLL_S):
                return True  # the signal that ended it comes to this process too, a little later
            raise ServerError(self._ended_by_itself())
        return self._following is not None

    def _wait_until_ready(self) -> bool:
        """True when a first chat was answered, False when this life was ended before."""
        folder = self._plan.run_folder
        watch = StartWatch()
        with StartProgress(self._out, last_start(folder)) as progress:
            while not self._is_over():
                status = self._server.status
                if cause := watch.cause(status, lambda: self._server.dead_workers()):
                    raise ServerError(f"{cause}\nThe whole story: {self._server.log_path}")
                healthy = status.get("status") == "RUNNING" and self._readiness.is_healthy()
                progress.at(*(("answering a first chat", "") if healthy else describe(status)))
                if healthy and self._readiness.gives_a_token():
                    self._wait_for_redis(progress)
                    ready = ready_text(self._plan, progress.done(), self._out.is_terminal)
                    note_start(folder, progress.took)
                    self._out.print(f"\n{ready}\n", markup=False)
                    return True
        return False

    def _wait_for_redis(self, progress: StartProgress) -> None:
        """Wait for the KV that an earlier life stored, before it is said to be ready. Requests are served meanwhile."""
        end = time.monotonic() + _INDEXING_S
        while time.monotonic() < end and self._readiness.indexing() and not self._is_over():
            progress.at("reading what Redis holds")

    def _warn(self) -> None:
        """Say what the server does without, in its own words."""
        for _ in range(_SETTLE_POLLS):
            ailments = self._readiness.ailments()
            if ailments == [] or self._signals.wait_for_stop(_POLL_S):
                break
        for ailment in ["the server does not answer /health"] if ailments is None else ailments:
            self._out.print(f"[yellow]{escape(ailment)}[/]")

    def _stop(self) -> None:
        self._say("stopping …" if self._following is None else "restarting: stopping …")
        requests = self._readiness.requests() if self._server.status.get("status") == "RUNNING" else None
        if requests:
            self._say(f"waiting for running requests ({requests}); Ctrl-C again ends them")

        def takes_long() -> None:
            if not requests:
                self._say("still waiting: Serve lets running requests end; Ctrl-C again ends everything")

        killed = self._server.stop(self._signals.impatient, takes_long)
        self._say("stopped" + (f" ({killed} processes did not end by themselves and were killed)" if killed else ""))

    def _say(self, text: str) -> None:
        # The terminal may be gone, or whatever read the pipe (which rich turns into SystemExit): stopping goes on.
        with contextlib.suppress(OSError, SystemExit):
            self._out.print(text)

    def _ended_by_itself(self) -> str:
        server = self._server
        tail = "\n".join(server.last_lines(15))
        return (
            f"{tail}\n\nThe server ended by itself (exit code {server.exit_code}). The whole story: {server.log_path}"
        )
