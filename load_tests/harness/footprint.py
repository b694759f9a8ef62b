"""Memory of a running server: proportional set size (PSS) of `make serve` and of all processes below it.

python -m load_tests.harness.footprint --port 8000
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

MIB = 1024**2


def launcher_of(port: int) -> psutil.Process:
    """The `app.launch` process whose server listens on `port`. Raises LookupError."""
    for connection in psutil.net_connections("tcp"):
        listening = connection.status == psutil.CONN_LISTEN and bool(connection.laddr)
        if listening and connection.laddr.port == port and connection.pid:  # type: ignore[union-attr]
            ancestors = psutil.Process(connection.pid).parents()
            launchers: list[psutil.Process] = [process for process in ancestors if "app.launch" in process.cmdline()]
            if launchers:
                return launchers[-1]
    raise LookupError(f"no server that `make serve` started listens on port {port}")


def pss_by_process(top: psutil.Process) -> list[tuple[str, int]]:
    """(command, PSS in bytes) of a process and its descendants, largest first."""
    rows = []
    for process in [top, *top.children(recursive=True)]:
        try:
            rows.append((" ".join(process.cmdline())[:60], process.memory_full_info().pss))
        except psutil.Error:
            continue
    return sorted(rows, key=lambda row: -row[1])


def main(
    port: int = 8000, json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None
) -> None:
    """Print the table and the sum."""
    try:
        rows = pss_by_process(launcher_of(port))
    except LookupError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    total = sum(size for _, size in rows)
    table = Table("process", "PSS MiB")
    for command, size in rows[:12]:
        table.add_row(command, str(size // MIB))
    table.add_row(f"all {len(rows)} processes", str(total // MIB))
    Console(stderr=json_file == "-").print(table)
    if json_file:
        text = json.dumps({"processes": len(rows), "pss_bytes": total})
        print(text) if json_file == "-" else Path(json_file).write_text(text)


if __name__ == "__main__":
    typer.run(main)
