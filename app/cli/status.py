"""`crosskv status`: how a server is, and what its tiers hold. A tenant's key shows the tenant's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.failures import NOT_SO, CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.samples import Samples
from app.cli.server import ServerClient, connect
from app.cli.stored import stored_by_tier
from app.cli.terminal import add_row, line, print_json, share, size, table

SOURCES = ("device", "cpu", "redis", "recomputed")
_STYLES = {"ok": "green", "degraded": "yellow"}


@tells_failures
def status(url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Show how the server is, and what its tiers hold. Exit code 1: a part is not well."""
    with connect(url, key_file) as server:
        health, stats, tokens = server.health(), _stats(server), _prompt_tokens(server)
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, {"health": health, "stats": stats, "prompt_tokens": tokens})
    else:
        for part in _shown(server.url, health, stats, tokens):
            console.print(part)
    if health["status"] != "ok":
        raise typer.Exit(NOT_SO)


def tokens_by_source(metrics: Samples) -> dict[str, int]:
    """Prompt tokens since the start, by where their KV came from."""
    found = metrics.by("crosskv_prompt_tokens_total", "source")
    return {source: int(found.get(source, 0)) for source in SOURCES}


def tiers_table(stats: Mapping[str, Any]) -> Table:
    """What the shared tiers hold."""
    tiers = table("tier", "segments>", "used>", "of>", ">")
    for tier, stored in stored_by_tier(stats).items():
        used = "" if stored.fill is None else share(stored.nbytes, stored.budget_bytes or 0)
        add_row(tiers, (tier, stored.segments, size(stored.nbytes), size(stored.budget_bytes), used))
    return tiers


def _stats(server: ServerClient) -> dict[str, Any] | None:
    """The manager's figures; None while it does not answer. Raises CommandError for a key that is refused."""
    try:
        return server.get("/api/v1/kv/stats")
    except CommandError as error:
        if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return None


def _prompt_tokens(server: ServerClient) -> dict[str, int] | None:
    """Return the server's counts; None for a caller that may not see them."""
    try:
        return tokens_by_source(server.metrics())
    except CommandError:
        return None


def _shown(
    url: str, health: Mapping[str, Any], stats: Mapping[str, Any] | None, prompt_tokens: Mapping[str, int] | None
) -> Iterator[RenderableType]:
    said = str(health["status"])
    yield Text.assemble(line(f"{url} is "), line(said, _STYLES.get(said, "red")))
    parts = health.get("parts")
    if isinstance(parts, Mapping) and parts:
        yield _parts(parts)
    if stats is None:
        yield line(
            "The KV manager does not answer: prompts are computed, and devices keep their own prefix cache.", "red"
        )
    else:
        yield tiers_table(stats)
    if prompt_tokens:
        whole = sum(prompt_tokens.values())
        yield line("prompt tokens: " + ", ".join(f"{source} {share(n, whole)}" for source, n in prompt_tokens.items()))


def _parts(parts: Mapping[str, Any]) -> Table:
    shown = table("part", "state", "")
    for name, part in parts.items():
        said = dict(part) if isinstance(part, Mapping) else {"state": part}
        state = said.pop("state", None)
        more = ", ".join(f"{key}: {value}" for key, value in said.items())
        add_row(shown, (name, line(state, "green" if state == "ok" else "red"), more))
    return shown
