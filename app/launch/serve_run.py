"""The child process of `make serve`: a Ray of its own, then `serve run`, which finds Ray initialised and uses it.

    python -m app.launch.serve_run CONFIG STATUS_FD

Serve's view of the application goes to the parent as JSON lines on STATUS_FD:

    {"phase": "ray"}                                    Ray is up
    {"phase": "app", "status": "DEPLOYING", "message": "...",
     "deployments": {"Replica": {"running": 1, "target": 2, "status": "UPDATING", "message": "..."}}}

A reporter thread writes them; when the parent is gone it interrupts the main thread, which ends as after a Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.schema import ReplicaState
from ray.serve.scripts import cli

from app.launch.cluster import ray_options
from configs.settings import load_settings

_REPORT_EVERY_S = 0.5


def main() -> None:
    """Start Ray, then hand this process to `serve run` until it is interrupted."""
    config_path, status_fd = sys.argv[1], int(sys.argv[2])
    application = yaml.safe_load(Path(config_path).read_text())["applications"][0]
    with os.fdopen(status_fd, "w", buffering=1) as status:
        ray.init(**ray_options(load_settings(application["args"])))
        status.write(json.dumps({"phase": "ray"}) + "\n")
        threading.Thread(target=_report, args=(status, application["name"]), daemon=True).start()
        cli(["run", config_path], prog_name="serve")


def _report(status: Any, app_name: str) -> None:
    while True:
        try:
            status.write(json.dumps(_application_status(app_name)) + "\n")
        except BrokenPipeError:  # the parent is gone
            os.kill(os.getpid(), signal.SIGINT)
            return
        except ValueError:  # closed: main() is ending
            return
        time.sleep(_REPORT_EVERY_S)


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
