"""`crosskv check`: everything that `make serve` looks at before it starts anything, and nothing started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli.failures import CANNOT, DONE, NOT_SO, CommandError, tells_failures
from app.cli.options import AsJson
from app.cli.terminal import add_row, line, print_json, table
from configs.model_folder import PROJECT_ROOT

_OWN_FILE = PROJECT_ROOT / "serve_config.yaml"
_STYLES = {"ok": "green", "lacks": "yellow", "cannot": "red"}


@tells_failures
def check(
    config: Annotated[Path, typer.Argument(metavar="[FILE]", help="Serve's configuration file.")] = _OWN_FILE,
    port: Annotated[str | None, typer.Option(help="HTTP port.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a Hugging Face id, or a preset's name.")] = None,
    scenario: Annotated[str | None, typer.Option(help="What the server is for: docs/guide/scenarios.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what of a configuration was checked, starting nothing. Exit code 0: it starts, 1: it lacks, 2: it cannot."""
    found = _look(config, port, model, scenario)
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, [{"part": part, "state": state, "said": said} for part, state, said in found])
    else:
        shown = table("part", "state", "")
        for part, state, said in found:
            add_row(shown, (part, line(state, _STYLES[state]), said))
        console.print(shown)
    states = {state for _, state, _ in found}
    raise typer.Exit(CANNOT if "cannot" in states else NOT_SO if "lacks" in states else DONE)


def _look(config: Path, port: str | None, model: str | None, scenario: str | None) -> list[tuple[str, str, str]]:
    """By part: how it is, and what was found. Raises CommandError for a file or a setting that cannot be read."""
    from app.launch.plan import Overrides, checks_before, read_plan  # what the other commands need not load
    from configs.settings import SettingsError

    try:
        plan = read_plan(config, Overrides.parse(model, scenario, port=port))
    except SettingsError as error:
        raise CommandError(str(error)) from None
    found: list[tuple[str, str, str]] = [("settings", "ok", f"{config} holds settings that fit together")]
    for one in checks_before(plan, _running(plan)):
        try:
            said = one.look()
        except SettingsError as error:
            found.append((one.part, "cannot", str(error)))
        else:
            found.append((one.part, "ok" if said.well else "lacks", said.words))
    return found


def _running(plan: Any) -> Any:
    """What a server that was started from here runs with, on the plan's port: its place is the one to take."""
    from app.launch.plan import Overrides, read_plan
    from app.launch.run_folder import find_launcher
    from configs.settings import SettingsError

    if find_launcher(plan.port) is None:
        return None
    try:
        return read_plan(plan.run_folder / "serve_config.yaml", Overrides())
    except SettingsError:
        return None
