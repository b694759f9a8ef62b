"""`crosskv clear`: forget KV. It says what would go, and does nothing unless the user agrees."""

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

_CLEAR = "/api/v1/kv/clear"


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
        raise CommandError("There is no terminal to ask at, so nothing was cleared: give --yes.")
    with connect(url, key_file) as server:
        if not yes:
            would = server.post(_CLEAR, {"tiers": names, "dry_run": True}).get("would")
            of_tenant = "tenant" in server.get("/api/v1/kv/stats")
            _agree(names, would if isinstance(would, Mapping) else {}, of_tenant, server.url)
        answer = server.post(_CLEAR, {"tiers": names})
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, answer)
    else:
        figures = ", ".join(f"{name}: {value}" for name, value in answer.items())
        console.print(line(f"cleared {', '.join(names)} ({figures})"))


def somebody_is_there() -> bool:
    """Whether a person can be asked: a script's input cannot agree."""
    return sys.stdin.isatty()


def _agree(names: Sequence[str], would: Mapping[str, Any], of_tenant: bool, url: str) -> None:
    """Return when a person agrees to what `would` go. Raises CommandError when not."""
    whose = "your tenant's KV" if of_tenant else "all tenants' KV"
    what = ", ".join(f"{name}{_amount(name, would)}" for name in names)
    asking = Console(stderr=True, soft_wrap=True)
    asking.print(line(f"This forgets {whose} in {what} of {url}. Running requests go on."))
    if not typer.confirm("Go on?", default=False, err=True):
        raise CommandError("Nothing was cleared.", NOT_SO)


def _amount(tier: str, would: Mapping[str, Any]) -> str:
    """What would go from a tier: segments and bytes, on devices blocks; nothing where the server does not tell."""
    of = would.get(tier)
    if not isinstance(of, Mapping):
        return ""
    if tier == ClearedTier.device:
        blocks = [replica.get("blocks") for replica in of.values() if isinstance(replica, Mapping)]
        return f" ({sum(count for count in blocks if isinstance(count, int))} blocks)"
    stored = stored_by_tier({"tiers": would})[tier]
    return f" ({stored.segments} segments, {size(stored.nbytes)})"
