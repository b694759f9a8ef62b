"""The child process of `make serve`: a Ray of its own, then `serve run`, which finds Ray initialised and uses it.

    python -m app.launch.serve_run CONFIG RAY_FOLDER STATUS_FD

The environment is that of `app.launch.cluster.ray_environment` and `app.launch.haproxy.haproxy_environment`.

Serve's view of the application goes to the parent as JSON lines on STATUS_FD:

    {"phase": "ray"}                                    Ray is up
    {"phase": "app", "status": "DEPLOYING", "message": "...",
     "deployments": {"Replica": {"running": 1, "target": 2, "status": "UPDATING", "message": "..."}}}

A reporter thread writes them; when the parent is gone it interrupts the main thread, which ends as after a Ctrl-C, and
then ends what the parent would have ended: Ray's agents try for a minute and more to tell a Ray that is gone.

On an interrupt `serve run` ends the proxy at once, and with it every answer that is under way. So the application
is deleted first: it lets its requests end (`http.drain_s`) while the proxy still carries them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from ray import serve
from ray.serve.schema import ReplicaState
from ray.serve.scripts import cli

from app.launch.cluster import ray_options
from app.launch.descendants import become_subreaper
from app.launch.ray_start import end_all, start_ray
from configs.settings import load_settings
from deployments.protocol.memory import keep_giving_back

_REPORT_EVERY_S = 0.5
_REPORT_RUNNING_EVERY_S = 5.0
"""Once the application has run: Serve pickles the router's class for each report (some 35 ms of a slow core)."""


def main() -> None:
    """Start Ray, then hand this process to `serve run` until it is interrupted."""
    config_path, ray_folder, status_fd = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    parent = os.getppid()
    become_subreaper()
    keep_giving_back()
    application = yaml.safe_load(Path(config_path).read_text(encoding="utf-8"))["applications"][0]
    with os.fdopen(status_fd, "w", buffering=1, encoding="utf-8") as status:
        settings = load_settings(application["args"])
        start_ray(ray_options(settings, ray_folder))
        status.write(json.dumps({"phase": "ray"}) + "\n")
        running = threading.Event()
        signal.signal(signal.SIGINT, _Interrupt(application["name"], running, settings.http.drain_s))
        threading.Thread(target=_report, args=(status, application["name"], running), daemon=True).start()
        try:
            cli(["run", config_path], prog_name="serve")
        finally:
            if os.getppid() != parent:
                end_all(ray_folder)


class _Interrupt:
    """The handler of SIGINT, on the main thread: lets requests end first, where there can be any."""

    def __init__(self, app_name: str, running: threading.Event, drain_s: float) -> None:
        self._app_name = app_name
        self._running = running
        self._drain_s = drain_s

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._running.is_set():
            with contextlib.suppress(Exception):  # nothing to wait for then
                self._delete(time.monotonic() + self._drain_s)
        raise KeyboardInterrupt

    def _delete(self, until: float) -> None:
        """Serve waits for a minute at most, and requests may have longer."""
        while True:
            try:
                return serve.delete(self._app_name)
            except TimeoutError:
                if time.monotonic() > until:
                    raise


def _report(status: Any, app_name: str, running: threading.Event) -> None:
    parent_gone = select.poll()
    parent_gone.register(status.fileno(), 0)
    while True:
        try:
            report = _application_status(app_name)
            if report.get("status") == "RUNNING":
                running.set()
            status.write(json.dumps(report) + "\n")
        except BrokenPipeError:  # the parent is gone
            os.kill(os.getpid(), signal.SIGINT)
            return
        except ValueError:  # closed: main() is ending
            return
        parent_gone.poll(1000 * (_REPORT_RUNNING_EVERY_S if running.is_set() else _REPORT_EVERY_S))


def _application_status(app_name: str) -> dict[str, Any]:
    try:
        application = serve.status().applications.get(app_name)
    except Exception as error:  # the controller is not there yet, or is restarting
        return {"phase": "serve", "message": f"{type(error).__name__}: {error}"}
    if application is None:
        return {"phase": "serve", "message": ""}
    return {
        "phase": "app",
        "status": application.status.value,
        "message": application.message,
        "deployments": {
            name: {
                "status": deployment.status.value,
                "message": deployment.message,
                "running": deployment.replica_states.get(ReplicaState.RUNNING, 0),
                "target": sum(deployment.replica_states.values()),
            }
            for name, deployment in application.deployments.items()
        },
    }


if __name__ == "__main__":
    main()
