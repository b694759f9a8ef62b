"""`python -m app.demo`: what `make demo` runs.

Exit codes: 0 every answer and every reuse count was right, 1 something was wrong, 2 there was no server to ask, or it
does not let a demo be shown (one sentence on stderr says why).
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from app.demo.redis_scenes import RedisScenes
from app.demo.report import Report
from app.demo.restart import Restart
from app.demo.scenes import Scenes
from app.demo.server import DemoError, DemoServer
from app.demo.stage import DemoRun
from app.launch.surroundings.streams import show_what_can_be_shown

DEMO_MODEL = "demo"
"""The name that models/demo is served by."""


def demo(
    port: Annotated[int, typer.Option(help="The server's HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="The server's host.")] = "127.0.0.1",
    model: Annotated[str | None, typer.Option(help="The served model's name; empty: the first that it lists.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CROSSKV_API_KEY", help="A key of the server's http.api_keys, with `admin: true`."),
    ] = None,
    restart: Annotated[
        bool, typer.Option(help="Restart the whole server too, if `make serve` runs it on this machine.")
    ] = True,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the table as JSON to this file, or to stdout with -.")
    ] = None,
) -> None:
    """Show on a running server what the shared KV cache reuses, and check every count and answer."""
    out = Console(highlight=False, stderr=json_file == "-")
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    server = None
    try:
        # A salt of its own for each run: nothing that was sent before is found, so a second run shows the same.
        server = DemoServer(f"http://{host}:{port}", f"demo-{uuid.uuid4()}", model, api_key)
        is_demo_model = server.model == DEMO_MODEL
        title = (
            f"{server.model} at {server.url}, {len(server.replicas)} replica{'s' if len(server.replicas) > 1 else ''},"
            f" blocks of {server.block_size_tokens} tokens"
        )
        out.print(f"{escape(title)}\n")
        if server.ailing:
            out.print(f"[yellow]Its /health says: {escape(', '.join(server.ailing))}[/]\n")
        with Report(out) as report:
            stage = DemoRun(server, report, is_demo_model)
            asked = Scenes(stage).play()
            RedisScenes(stage, Restart(server, restart)).play(asked)
    except DemoError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(error.exit_code) from None
    finally:
        if server is not None:
            server.close()
    out.print(_verdict(report, is_demo_model))
    if json_file:
        try:
            _write(json_file, {"model": server.model, "passed": report.passed, "rows": report.as_data()})
        except OSError as error:
            err.print(f"{json_file} cannot be written ({error.strerror}).", markup=False)
            raise typer.Exit(2) from None
    raise typer.Exit(0 if report.passed else 1)


def _verdict(report: Report, is_demo_model: bool) -> str:
    scope = "reuse counts" if not is_demo_model else "answers and reuse counts"
    left_out = "" if is_demo_model else f" (answers were not checked: the model is not served as “{DEMO_MODEL}”)"
    wrong = sum(bool(row.problems) for row in report.rows)
    if wrong:
        return f"[bold red]✗[/] {wrong} of {len(report.rows)} rows are wrong{left_out}"
    return f"[green]✓[/] all {scope} are right{left_out}"


def _write(file: str, data: dict[str, object]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    show_what_can_be_shown()
    typer.run(demo)
