"""`python -m app.launch serve_config.yaml`: what `make serve` runs.

Exit codes: 0 stopped as asked, 1 the server failed, 2 a setting cannot work (one sentence says which, on stderr).
SIGHUP reads the configuration again and restarts everything; a configuration that cannot work changes nothing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # until `Signals` is there: a stop that comes during the imports is one as asked, too
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(0))

import typer
from rich.console import Console

from app.launch.life import Life, ServerError
from app.launch.plan import LaunchPlan, Overrides, make_plan
from app.launch.signals import Signals
from app.launch.surroundings.python import show_what_can_be_shown
from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError

EXIT_FAILED, EXIT_SETTING = 1, 2

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def launch(
    config: Annotated[Path, typer.Argument(help="Serve's configuration file.")] = PROJECT_ROOT / "serve_config.yaml",
    port: Annotated[str | None, typer.Option(help="HTTP port.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a Hugging Face id, or a preset's name.")] = None,
    replicas: Annotated[str | None, typer.Option(help="Engines that serve the model side by side.")] = None,
    device_blocks: Annotated[str | None, typer.Option(help="KV blocks per replica.")] = None,
    max_model_len: Annotated[str | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    scenario: Annotated[str | None, typer.Option(help="What the server is for: docs/guide/scenarios.md.")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C; SIGHUP restarts."""
    signals = Signals()
    try:
        overrides = Overrides.parse(
            model, scenario, port=port, replicas=replicas, device_blocks=device_blocks, max_model_len=max_model_len
        )
        plan: LaunchPlan | None = make_plan(config, overrides)
    except SettingsError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_SETTING) from None
    while plan is not None and not signals.wait_for_stop(0):
        life = Life(plan, signals, lambda running: make_plan(config, overrides, running), out, err)
        try:
            plan = life.run()
        except ServerError:
            raise typer.Exit(EXIT_FAILED) from None


if __name__ == "__main__":
    show_what_can_be_shown()
    typer.run(launch)
