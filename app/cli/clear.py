"""`crosskv clear`: forget KV. It says what would go, and does nothing unless somebody agrees."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli.failures import NOT_SO, CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import connect
from app.cli.stored import stored_by_tier
from app.cli.terminal import line, print_json, size


class ClearedTier(StrEnum):
    """What may be cleared."""

    device = "device"
    cpu = "cpu"
    redis = "redis"


@tells_failures
def clear(
    tiers: Annotated[list[ClearedTier], typer.Argument(metavar="TIER", help="`device`, `cpu`, `redis`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without a question.")] = False,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Forget the KV in these tiers: your own, or, with an administrator's key, all tenants'. Asks before it does."""
    names = list(dict.fromkeys(tier.value for tier in tiers))
    if not yes and not somebody_is_there():
        raise CommandError("Nobody can be asked here, so nothing was cleared: give --yes.")
    with connect(url, key_file) as server:
        if not yes:
            _agree(names, server.get("/api/v1/kv/stats"), server.url)
        answer = server.post("/api/v1/kv/clear", {"tiers": names})
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, answer)
    else:
        figures = ", ".join(f"{name}: {value}" for name, value in answer.items())
        console.print(line(f"cleared {', '.join(names)} ({figures})"))


def somebody_is_there() -> bool:
    """Whether a person can be asked: a script's input is nobody's word."""
    return sys.stdin.isatty()


def _agree(names: Sequence[str], stats: Mapping[str, Any], url: str) -> None:
    """Return when a person agrees. Raises CommandError when not."""
    stored = stored_by_tier(stats)
    sizes = {
        name: f" ({stored[name].segments} segments, {size(stored[name].nbytes)})" for name in names if name in stored
    }
    whose = "your tenant's KV" if "tenant" in stats else "all tenants' KV"
    what = ", ".join(name + sizes.get(name, "") for name in names)
    asking = Console(stderr=True, soft_wrap=True)
    asking.print(line(f"This forgets {whose} in {what} of {url}. Running requests go on."))
    if not typer.confirm("Go on?", default=False, err=True):
        raise CommandError("Nothing was cleared.", NOT_SO)
