"""Memory of a running server: proportional set size (PSS) of `make serve` and of all processes below it.

python -m load_tests.harness.footprint --port 8000
"""

from __future__ import annotations

import psutil
import typer

from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, one_sentence
from load_tests.measuring.processes import pss_by_process

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


def main(port: int = 8000, json_file: JsonFile = None) -> None:
    """Print the table and the sum."""
    with one_sentence(LookupError):
        rows = pss_by_process(launcher_of(port))
    total = sum(size for _, size in rows)
    lines = [[command, str(size // MIB)] for command, size in rows[:12]]
    text = report.table(["process", "PSS MiB"], [*lines, [f"all {len(rows)} processes", str(total // MIB)]])
    report.deliver(text, {"processes": len(rows), "pss_bytes": total}, json_file)


if __name__ == "__main__":
    typer.run(main)
