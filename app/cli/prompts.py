"""`crosskv lookup`, `pin` and `unpin`: what is about one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli.failures import NOT_SO, CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import connect
from app.cli.terminal import add_row, line, print_json, share, table

Prompt = Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; `-` reads it from standard input.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="TEXT is a chat's one message of a user, not a completion's prompt.")
]
Salt = Annotated[str | None, typer.Option("--cache-salt", help="What the prompt's requests send as `cache_salt`.")]
Fidelity = Annotated[str | None, typer.Option(help="`exact`, `tolerant` or `blended`, as the prompt's requests say.")]
Model = Annotated[
    str | None, typer.Option(help="What the prompt's requests name as `model`: an adapter has KV of its own.")
]
MOST_SEGMENTS = 40


@tells_failures
def lookup(
    text: Prompt, chat: Chat = False, model: Model = None, cache_salt: Salt = None, fidelity: Fidelity = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show where the KV of a prompt lies. Exit code 1: nothing of it is stored."""
    params = {"model": model, "cache_salt": cache_salt, "fidelity": fidelity}
    text = _text(text)
    params |= {"messages": json.dumps(_messages(text))} if chat else {"text": text}
    with connect(url, key_file) as server:
        found = server.get("/api/v1/kv/lookup", {name: value for name, value in params.items() if value is not None})
    console = Console()
    if as_json:
        print_json(console, found)
    else:
        _show(console, found)
    if not any(_by_tier(found).values()):
        raise typer.Exit(NOT_SO)


@tells_failures
def pin(
    text: Prompt,
    ttl_s: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that the pin lasts.")] = 3600.0,
    chat: Chat = False, model: Model = None, cache_salt: Salt = None, fidelity: Fidelity = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Keep the KV of a prompt's known beginning in the shared tiers for a while."""
    body = _body(text, chat, model, cache_salt, fidelity) | {"ttl_s": ttl_s}
    with connect(url, key_file) as server:
        answer = server.post("/api/v1/kv/pin", body)
    _say(answer, f"pinned for {ttl_s:.0f} s", as_json)


@tells_failures
def unpin(
    text: Prompt, chat: Chat = False, model: Model = None, cache_salt: Salt = None, fidelity: Fidelity = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """End what `pin` began."""
    with connect(url, key_file) as server:
        answer = server.post("/api/v1/kv/unpin", _body(text, chat, model, cache_salt, fidelity))
    _say(answer, "no longer pinned", as_json)


def _body(text: str, chat: bool, model: str | None, cache_salt: str | None, fidelity: str | None) -> dict[str, Any]:
    """How the control API is told of a prompt."""
    text = _text(text)
    body: dict[str, Any] = {"messages": _messages(text)} if chat else {"text": text}
    body |= {name: value for name, value in (("model", model), ("cache_salt", cache_salt)) if value is not None}
    if fidelity is not None:
        body["kv_cache"] = {"fidelity": fidelity}
    return body


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _text(given: str) -> str:
    """Raises CommandError for what is no text: an argument in another encoding, an empty prompt."""
    text = sys.stdin.read() if given == "-" else given
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CommandError("TEXT is not UTF-8: nothing was sent.") from None
    if not text:
        raise CommandError("TEXT is empty: give the prompt that is meant.")
    return text


def _by_tier(found: Mapping[str, Any]) -> dict[str, int]:
    """Leading tokens of the prompt by place."""
    tiers = found.get("tokens_by_tier") or {}
    devices = {f"device of replica {replica}": int(tokens) for replica, tokens in (tiers.get("device") or {}).items()}
    return devices | {tier: int(tiers[tier]) for tier in ("cpu", "redis") if tier in tiers}


def _show(console: Console, found: Mapping[str, Any]) -> None:
    tokens = int(found.get("tokens", 0))
    console.print(line(f"{tokens} tokens, blocks of {found.get('block_size_tokens')} tokens"))
    places = table("where", "leading tokens>", ">")
    for place, stored in _by_tier(found).items():
        add_row(places, (place, stored, share(stored, tokens)))
    if (landing := found.get("landing_token")) is not None:
        add_row(places, ("can be loaded, with the states", int(landing), share(int(landing), tokens)))
    console.print(places)
    segments = found.get("segments") or []
    if segments:
        shown = table("segment", "tokens", "tiers", "kind", "uses>", "")
        for one in segments[:MOST_SEGMENTS]:
            span = f"{one.get('start_token')}-{one.get('end_token')}"
            uses = f"{float(one.get('uses', 0)):.1f}"
            tiers = ", ".join(map(str, one.get("tiers", ())))
            marks = " ".join([*(mark for mark in ("pinned", "sparse") if one.get(mark)), *_landings(one)])
            add_row(shown, (str(one.get("key", ""))[:12], span, tiers, one.get("kind"), uses, marks))
        console.print(shown)
    if len(segments) > MOST_SEGMENTS:
        console.print(line(f"and {len(segments) - MOST_SEGMENTS} segments more (--json shows all)"))


def _landings(segment: Mapping[str, Any]) -> list[str]:
    """Where a prompt of a model with states can be resumed in a segment."""
    landings = segment.get("landings") or ()
    return [f"resumes at {one.get('end_token')} ({', '.join(map(str, one.get('tiers', ())))})" for one in landings]


def _say(answer: Mapping[str, Any], done: str, as_json: bool) -> None:
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, answer)
    else:
        figures = ", ".join(f"{name}: {value}" for name, value in answer.items())
        console.print(line(f"{done} ({figures})" if figures else done))
