"""`python -m app.launch serve_config.yaml`: what `make serve` runs.

Exit codes: 0 stopped as asked, 1 the server failed, 2 a setting cannot work (one sentence says which, on stderr).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.launch.plan import LaunchPlan, Overrides, make_plan
from app.launch.progress import StartProgress, describe, ready_text
from app.launch.readiness import Readiness
from app.launch.server import Server
from app.launch.stop_request import StopRequest
from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError

EXIT_FAILED, EXIT_SETTING = 1, 2

_POLL_S = 0.25
_FAILED_STATUSES = ("DEPLOY_FAILED", "UNHEALTHY")

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class ServerError(Exception):
    """The server cannot start, or has ended by itself. `str()` of it is for a person."""


def launch(
    config: Annotated[Path, typer.Argument(help="Serve's configuration file.")] = PROJECT_ROOT / "serve_config.yaml",
    port: Annotated[str | None, typer.Option(help="HTTP port.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a Hugging Face id, or a preset's name.")] = None,
    replicas: Annotated[str | None, typer.Option(help="Engines that serve the model side by side.")] = None,
    device_blocks: Annotated[str | None, typer.Option(help="KV blocks per replica.")] = None,
    max_model_len: Annotated[str | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C."""
    try:
        overrides = Overrides.parse(
            model, port=port, replicas=replicas, device_blocks=device_blocks, max_model_len=max_model_len
        )
        plan = make_plan(config, overrides)
    except SettingsError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_SETTING) from None
    stop = StopRequest()
    server = Server(plan)
    code = 0
    try:
        server.start()
        if _wait_until_ready(plan, server, stop):
            _wait_until_stopped(server, stop)
    except ServerError as failure:
        err.print(str(failure), markup=False)
        code = EXIT_FAILED
    finally:
        out.print("stopping …")
        killed = server.stop(stop.impatient)
        out.print("stopped" + (f" ({killed} processes did not end by themselves and were killed)" if killed else ""))
    raise typer.Exit(code)


def _wait_until_ready(plan: LaunchPlan, server: Server, stop: StopRequest) -> bool:
    """True when a first token was produced, False when a stop was asked for before."""
    readiness = Readiness(plan)
    try:
        with StartProgress(out) as progress:
            while not stop.wait(_POLL_S):
                _check_alive(server)
                progress.at(*describe(server.status))
                if server.status.get("status") == "RUNNING" and readiness.is_healthy():
                    progress.at("producing a first token")
                    if readiness.gives_a_token():
                        out.print("\n" + ready_text(plan, progress.done()) + "\n", markup=False)
                        return True
        return False
    finally:
        readiness.close()


def _wait_until_stopped(server: Server, stop: StopRequest) -> None:
    while not stop.wait(_POLL_S):
        if server.exit_code is not None:
            raise ServerError(_ended_by_itself(server))


def _check_alive(server: Server) -> None:
    if server.exit_code is not None:
        raise ServerError(_ended_by_itself(server))
    if server.status.get("status") in _FAILED_STATUSES:
        messages = [server.status["message"], *(d["message"] for d in server.status["deployments"].values())]
        raise ServerError(f"{_cause(messages)}\nThe whole story: {server.log_path}")


def _ended_by_itself(server: Server) -> str:
    tail = "\n".join(server.last_lines(15))
    return f"{tail}\n\nThe server ended by itself (exit code {server.exit_code}). The whole story: {server.log_path}"


def _cause(messages: list[str]) -> str:
    """The line that says what went wrong: a settings error's own sentence, or the last line of the last traceback."""
    for message in messages:
        found = re.search(r"SettingsError\S*: (.+)", message)
        if found:
            return found[1].strip()
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Exit)\b", line)]
    return (errors or lines or ["Serve gave no reason."])[-1]


if __name__ == "__main__":
    typer.run(launch)
