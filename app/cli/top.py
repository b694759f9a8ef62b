"""`crosskv top`: the cache live. Without a terminal, or with --once, one frame."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from app.cli.failures import CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.samples import Samples
from app.cli.server import ServerClient, connect
from app.cli.status import tiers_table, tokens_by_source
from app.cli.stored import stored_by_tier
from app.cli.terminal import add_row, line, print_json, share, table

_TTFT = "crosskv_time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class Frame:
    """What was seen at one moment; `at_s` on the monotonic clock."""

    at_s: float
    metrics: Samples
    stats: Mapping[str, Any]


@tells_failures
def top(
    every_s: Annotated[float, typer.Option(min=0.5, max=60, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, with totals since the server's start.")] = False,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the cache live: requests, where tokens come from, tiers, replicas. Ctrl-C ends it. For administrators."""
    console = Console()
    with connect(url, key_file) as server:
        frame = _look(server)
        if as_json:
            print_json(console, _as_data(frame))
        elif once or not console.is_terminal:
            console.print(_shown(server.url, frame, None))
        else:
            _live(console, server, frame, every_s)


def _live(console: Console, server: ServerClient, frame: Frame, every_s: float) -> None:
    """Frames until Ctrl-C. A server that goes away is waited for, in words."""
    before, ailment = frame, ""
    with Live(_shown(server.url, frame, None), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    before, frame, ailment = frame, _look(server), ""
                except CommandError as error:
                    ailment = str(error)
                live.update(_shown(server.url, frame, before, ailment), refresh=True)
        except KeyboardInterrupt:
            return


def _look(server: ServerClient) -> Frame:
    return Frame(time.monotonic(), server.metrics(), server.get("/api/v1/kv/stats"))


def _as_data(frame: Frame) -> dict[str, Any]:
    metrics = frame.metrics
    return {
        "prompts_ongoing": metrics.total("crosskv_prompts_ongoing"),
        "prompts_waiting": metrics.total("crosskv_prompts_waiting"),
        "prompt_tokens": tokens_by_source(metrics),
        "generated_tokens": metrics.total("crosskv_generated_tokens_total"),
        "ttft_s": metrics.mean(_TTFT),
        "plans": metrics.by("crosskv_plans_total", "reason"),
        "tiers": {tier: vars_of.nbytes for tier, vars_of in stored_by_tier(frame.stats).items()},
    }


def _shown(url: str, now: Frame, before: Frame | None, ailment: str = "") -> RenderableType:
    """One frame: rates since `before`, or totals since the server's start."""
    parts: list[RenderableType] = [line(f"crosskv at {url}", "bold")]
    if ailment:
        parts.append(line(ailment, "red"))
    since = before if before is not None and before.at_s < now.at_s else None
    parts += [_requests(now, since), _sources(now, since), tiers_table(now.stats), _replicas(now)]
    return Group(*parts)


def _requests(now: Frame, before: Frame | None) -> RenderableType:
    ongoing, waiting = (now.metrics.total(f"crosskv_prompts_{name}") for name in ("ongoing", "waiting"))
    said = f"{ongoing:.0f} prompts ongoing, {waiting:.0f} waiting"
    count, spent = (_risen(now, before, f"{_TTFT}_{end}") for end in ("count", "sum"))
    if count:
        said += f"; first token after {spent / count:.3f} s"
    generated = _risen(now, before, "crosskv_generated_tokens_total")
    if before is not None:
        return line(f"{said}; {generated / (now.at_s - before.at_s):.1f} tokens/s")
    return line(f"{said}; {generated:.0f} tokens answered")


def _sources(now: Frame, before: Frame | None) -> RenderableType:
    tokens = tokens_by_source(now.metrics)
    if before is not None:
        old = tokens_by_source(before.metrics)
        tokens = {source: max(0, count - old[source]) for source, count in tokens.items()}
    whole = sum(tokens.values())
    shown = table("prompt tokens from", "tokens>", ">", "")
    for source, count in tokens.items():
        add_row(shown, (source, count, share(count, whole), "█" * round(30 * count / whole) if whole else ""))
    return shown


def _replicas(now: Frame) -> RenderableType:
    running = now.metrics.by("vllm:num_requests_running", "replica")
    waiting = now.metrics.by("vllm:num_requests_waiting", "replica")
    blocks, free = (now.metrics.by(f"crosskv_device_{name}", "replica") for name in ("blocks", "free_blocks"))
    shown = table("replica", "running>", "waiting>", "device blocks>", "free>")
    for replica in sorted({*blocks, *running}):
        figures = (of.get(replica) for of in (running, waiting, blocks, free))
        add_row(shown, (replica, *("" if one is None else f"{one:.0f}" for one in figures)))
    return shown


def _risen(now: Frame, before: Frame | None, name: str) -> float:
    """Return by how much a counter has risen; a restarted server counts from 0."""
    total = now.metrics.total(name)
    old = before.metrics.total(name) if before is not None else 0.0
    return total - old if total >= old else total
