"""Conversations from many users at once, with a summary: `make load-test`, or `python -m load_tests.locust`

Runs Locust with `locustfile.py` in a process of its own, against --host, or the server at --port, or, where
none runs there, one that it starts for the run. `--results` holds what is left of a run: `summary.json` (the figures
below), `stats.json` (Locust's rows), `report.html` (the same, with plots) and `locust.log`.

Exit codes: 0, 1 too many errors or no answer, 2 a server, model or folder that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.server import ServerError, started
from load_tests.locust.server import Served, ServerUnreachableError, ServerUnusableError, find_model
from load_tests.locust.shapes import ShapeName
from load_tests.measuring import report
from load_tests.measuring.program import (
    EXIT_FELL_SHORT,
    EXIT_INPUT,
    EXIT_STOPPED,
    InputError,
    JsonFile,
    chosen,
    out,
    progress_bar,
    writable,
)
from load_tests.measuring.spread import number

CLASSES = {"chat": "ChatUser", "documents": "DocumentUser", "cold": "ColdUser"}
STOP_S = 30
"""How long requests that are under way at the end may take to end."""
MOST_ERRORS = 5
HEADER = (
    "users", "requests", "failed", "429", "TTFT p50 / p95 ms", "returning: TTFT p50 / p95 ms", "TPOT p50 / p95 ms",
    "output tokens/s", "cached",
)  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """Markdown: a row for each class and one for all, then the most frequent errors."""
    rows = {**summary["classes"], "all": summary["all"]}
    lines = [report.table(HEADER, (_row(name, figures) for name, figures in rows.items()))]
    errors = list(summary["errors"].items())
    if errors:
        lines += ["", *(f"{count} failed: {message}" for message, count in errors[:MOST_ERRORS])]
    if len(errors) > MOST_ERRORS:
        lines.append(f"{sum(count for _, count in errors[MOST_ERRORS:])} failed in other ways; see the results.")
    return "\n".join(lines)


def conclusion(summary: dict[str, Any], max_error_rate: float, interrupted: bool) -> tuple[str, int]:
    """One sentence, and the exit code. `max_error_rate` is a share of the requests, without those turned away."""
    every = summary["all"]
    requests, failures = every["requests"], every["failures"]
    counted = f"{requests} requests in {summary['seconds']:.0f} s"
    if interrupted:
        return f"Interrupted: {counted}, {failures} failed; the figures above are of these.", EXIT_STOPPED
    if requests == failures:
        return (
            f"No answer in {summary['seconds']:.0f} s: {failures} failed, {every['turned_away']} 429.",
            EXIT_FELL_SHORT,
        )
    rate = failures / requests
    if rate > max_error_rate:
        return f"{counted}, and {rate:.1%} failed; --max-error-rate allows {max_error_rate:.1%}.", EXIT_FELL_SHORT
    return f"{counted}, {failures} failed ({rate:.1%}).", 0


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        *(str(figures[count]) for count in ("requests", "failures", "turned_away")),
        *(_milliseconds(figures[times]) for times in ("ttft_s", "ttft_returning_s", "tpot_s")),
        f"{figures['output_tokens_per_s'] or 0:.0f}",
        "-" if figures["cached_share"] is None else f"{figures['cached_share']:.0%}",
    ]


def _milliseconds(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{number(1e3 * times['p50'])} / {number(1e3 * times['p95'])}"


class LocustError(Exception):
    """Locust ended by itself, or left no figures."""


@dataclass(frozen=True)
class Load:
    """What users do, for how long, and where the results go."""

    users: int
    duration_s: int
    shape: ShapeName
    classes: tuple[str, ...]
    think_s: float
    answer_tokens: int
    seed: int
    results: Path
    page_port: int | None

    def command(self, served: Served) -> list[str]:
        """Locust's command line."""
        options = {
            "--locustfile": PROJECT_ROOT / "load_tests" / "locust" / "locustfile.py",
            "--host": served.url,
            "--model": served.model,
            "--users": self.users,
            "--spawn-rate": self.users,  # all within a second
            "--run-time": f"{self.duration_s}s",
            "--shape": self.shape,
            "--think-s": self.think_s,
            "--answer-tokens": self.answer_tokens,
            "--seed": self.seed,
            "--stop-timeout": STOP_S,
            "--exit-code-on-error": 0,  # the threshold is ours
            "--json-file": self.results / "stats",
            "--html": self.results / "report.html",
            "--summary-file": self.summary_file,
        }
        if self.page_port is not None:
            options |= {"--web-host": "127.0.0.1", "--web-port": self.page_port}
        words = [str(word) for option in options.items() for word in option]
        mode = "--headless" if self.page_port is None else "--autostart"
        return [sys.executable, "-m", "locust", *words, mode, "--only-summary", *(CLASSES[c] for c in self.classes)]

    @property
    def summary_file(self) -> Path:
        """Written by Locust once a second, and at the end."""
        return self.results / "summary.json"

    @property
    def log(self) -> Path:
        """All that Locust prints."""
        return self.results / "locust.log"

    def summary(self) -> dict[str, Any] | None:
        """The run's figures so far."""
        try:
            found: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found


def empty(results: Path) -> Path:
    """The folder, made if need be, without an earlier run's figures. Raises InputError."""
    (writable(results, "--results") / "summary.json").unlink(missing_ok=True)
    return results.resolve()


@contextmanager
def a_server(host: str | None, port: int, model: str | None, api_key: str | None) -> Iterator[Served]:
    """The server at `host` or `port`, or one for this run. Raises InputError."""
    try:
        served = find_model(host or f"http://127.0.0.1:{port}", model, api_key)
    except ServerUnreachableError as error:
        if host is not None:
            raise InputError(str(error)) from None
    except ServerUnusableError as error:
        raise InputError(str(error)) from None
    else:
        yield served
        return
    with tempfile.TemporaryDirectory(prefix="load-test-") as folder:
        out.print(f"No server runs at port {port}: starting one for this run.")
        settings: dict[str, Any] = {"model": model} if model else {}
        try:
            with started(Path(folder), settings) as server:
                yield find_model(server.url, None, api_key)
                out.print("Stopping the server.")
        except ServerUnusableError as error:
            raise InputError(str(error)) from None
        except ServerError as error:
            out.print(str(error), markup=False)  # with the end of the server's log, which says why
            raise InputError("No load without a server: see above, or name a running one with --host.") from None


def run(load: Load, served: Served, api_key: str | None) -> bool:
    """Run Locust to its end, with a progress bar; False when it was interrupted. Raises LocustError, and
    KeyboardInterrupt when that was before there were figures.
    """
    # Its own session: Ctrl-C reaches this process only, which passes it on. The key is not for `ps` to see.
    environment = os.environ | ({"OPENAI_API_KEY": api_key} if api_key else {})
    with load.log.open("w", encoding="utf-8") as log:
        locust = subprocess.Popen(
            load.command(served),
            cwd=PROJECT_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        _watch(load, locust)
    except KeyboardInterrupt:
        over = not (load.summary() or {"running": True})["running"]
        locust.send_signal(signal.SIGINT)
        if not over:
            out.print(f"Interrupted: requests under way have {STOP_S} s to end; Ctrl-C again drops them.")
        try:
            locust.wait()
        except KeyboardInterrupt:
            locust.kill()
            locust.wait()
        if load.summary() is None:
            raise
        return over
    if locust.returncode:
        words = [line for line in load.log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise LocustError(f"Locust ended with code {locust.returncode}: {words[-1] if words else load.log}")
    return True


def _watch(load: Load, locust: subprocess.Popen[bytes]) -> None:
    if load.page_port is not None:
        out.print(f"Locust's page: http://127.0.0.1:{load.page_port} (Ctrl-C ends it)")
    with progress_bar("{task.fields[now]}") as progress:
        bar = progress.add_task("load", total=load.duration_s, now="")
        while locust.poll() is None:
            if summary := load.summary():
                every = summary["all"]
                now = f"{summary['users']} users, {every['requests']} requests, {every['failures']} failed"
                progress.update(bar, completed=summary["seconds"], now=now)
            time.sleep(0.25)


def show(load: Load, ended: bool, max_error_rate: float, json_file: str | None) -> tuple[str, int]:
    """Print the figures; a sentence about them, and the exit code. Raises LocustError and InputError."""
    summary = load.summary()
    if summary is None:
        raise LocustError(f"Locust left no figures; its words are in {load.log}.")
    try:
        report.deliver(table(summary), summary, json_file)
    except OSError as error:
        raise InputError(f"{json_file} cannot be written ({error.strerror}); see {load.summary_file}.") from None
    return conclusion(summary, max_error_rate, interrupted=not ended)


def main(
    host: Annotated[str | None, typer.Option(help="An OpenAI-compatible server's URL. Default: --port here.")] = None,
    port: Annotated[int, typer.Option(help="Of the server here; where none runs, one is started.")] = 8000,
    model: Annotated[
        str | None, typer.Option(help="The model's id; for a server that is started, as for `make serve`.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Users at the load's highest.")] = 6,
    duration: Annotated[int, typer.Option(min=1, help="Seconds.")] = 60,
    shape: Annotated[ShapeName, typer.Option(help="How the number of users changes.")] = "steady",
    classes: Annotated[str, typer.Option(help="What users do, with commas between.")] = ",".join(CLASSES),
    think_s: Annotated[float, typer.Option(min=0, help="Mean pause between a user's turns, in seconds.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal questions.")] = 0,
    max_error_rate: Annotated[float, typer.Option(min=0, max=1, help="Failed requests / requests.")] = 0.01,
    results: Annotated[Path, typer.Option(help="A folder; an earlier run's results are replaced.")] = (
        PROJECT_ROOT / "load_tests" / "results" / "load_test"
    ),
    page: Annotated[bool, typer.Option("--page", help="With Locust's web page, until Ctrl-C.")] = False,
    page_port: Annotated[int, typer.Option(help="The page's port.")] = 8089,
    json_file: JsonFile = None,
) -> None:
    """Put a load of conversations on a server, and print what its users saw."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    try:
        load = Load(
            users, duration, shape, chosen("class", classes.split(","), CLASSES), think_s, answer_tokens, seed,
            empty(results), page_port if page else None,
        )  # fmt: skip
        with a_server(host, port, model, api_key) as served:
            out.print(f"{served.url}, model {served.model}: {users} users, {duration} s, {shape}; {load.results}")
            ended = run(load, served, api_key)
            sentence, code = show(load, ended, max_error_rate, json_file)
    except (InputError, LocustError) as error:
        out.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT if isinstance(error, InputError) else EXIT_FELL_SHORT) from None
    except KeyboardInterrupt:
        out.print("Interrupted.")
        raise typer.Exit(EXIT_STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    out.print(sentence, markup=False)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
