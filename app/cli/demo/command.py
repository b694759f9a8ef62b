"""`crosskv demo`: plays the script and shows its rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Final

import typer
from rich.console import Console

from app.cli.demo.documents import DOCUMENTS, GREETING, HOME, TWO_HOPS, Question
from app.cli.demo.turns import SOURCES, DemoRow, DemoServer, Message
from app.cli.failures import NOT_SO, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import connect
from app.cli.terminal import line, print_json

_MARKS: Final = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("-", "dim")}
_MOST_SHOWN: Final = 200
"""Characters of an answer."""


@tells_failures
def demo(url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Show on a running server what the shared cache saves. Exit code 0: all rows are right, 1: not, 2: no server."""
    console = Console(highlight=False, soft_wrap=True)
    rows: list[DemoRow] = []
    with connect(url, key_file) as client:
        # A salt of its own for each run: nothing that was sent before is found, so a second run shows the same.
        server = DemoServer(client, f"demo-{uuid.uuid4()}")
        if not as_json:
            blocks = f"blocks of {server.block_tokens} tokens"
            console.print(line(f"{server.model} at {client.url}, replicas: {len(server.replicas)}, {blocks}"))
            if server.ailing:
                console.print(line(f"Its /health says: {', '.join(server.ailing)}", "yellow"))
        for row in script(server):
            rows.append(row)
            if not as_json:
                _show(console, row)
    passed = all(row.passed is not False for row in rows)
    if as_json:
        print_json(console, {"model": server.model, "passed": passed, "rows": [row.as_data() for row in rows]})
    else:
        scope = "answers and reuse counts" if server.is_demo_model else "reuse counts (no answer is known)"
        verdict = f"all {scope} are right" if passed else "some rows are wrong"
        console.print(line(f"{_MARKS[passed][0]} {verdict}", _MARKS[passed][1]))
    if not passed:
        raise typer.Exit(NOT_SO)


def script(server: DemoServer) -> Iterator[DemoRow]:
    """Yield a row for each way in which a prompt's KV is found again. Later ones need what earlier ones left."""
    here, there = server.replicas[0], server.replicas[:2][-1]
    alone = here == there
    chat = _chat(HOME)
    cold = server.ask("cold", HOME, chat, here, "recomputed")
    yield cold.row
    yield server.ask("again: device hit", HOME, chat, here, "device", cold.prompt_ids).row

    server.wait_for("cpu", cold.computed)
    across = "another replica: CPU-tier hit"
    if alone:
        yield DemoRow(across, None, notes=("left out: this server runs one replica",))
    else:
        yield server.ask(across, HOME, chat, there, "cpu", cold.prompt_ids).row
    server.clear("device")
    yield server.ask("devices cleared: CPU-tier hit", HOME, chat, here, "cpu", cold.prompt_ids).row

    chat = _chat(GREETING)
    before = server.ask("same documents, a longer answer", GREETING, chat, here, "device", cold.prompt_ids)
    yield before.row
    server.wait_for("cpu", before.computed)
    if alone:
        server.clear("device")
    chat += [{"role": "assistant", "content": before.text}, {"role": "user", "content": TWO_HOPS.text}]
    last = server.ask("next turn: the answer is reused", TWO_HOPS, chat, there, "cpu", before.computed)
    yield last.row

    redis = server.parts.get("redis", {"state": "this server uses none"})["state"]
    if redis != "ok":
        yield DemoRow("Redis hit", None, notes=(f"left out: Redis: {redis}",))
        return
    for tier in ("cpu", "redis"):
        server.wait_for(tier, last.computed)
    server.clear("device", "cpu")
    server.wait_until_empty("cpu", last.computed)
    yield server.ask("devices and CPU tier cleared: Redis hit", TWO_HOPS, chat, here, "redis", last.prompt_ids).row
    server.wait_for("cpu", last.prompt_ids)
    if alone:
        server.clear("device")
    scene = f"{'devices cleared' if alone else 'another replica'}: what Redis brought is in the CPU tier"
    yield server.ask(scene, TWO_HOPS, chat, there, "cpu", last.prompt_ids).row


def _chat(question: Question) -> list[Message]:
    return [{"role": "system", "content": DOCUMENTS}, {"role": "user", "content": question.text}]


def _show(console: Console, row: DemoRow) -> None:
    mark, style = _MARKS[row.passed]
    counts = ", ".join(f"{row.tokens[name]} {words}" for name, words in SOURCES.items()) if row.tokens else ""
    console.print(line(f"{mark} {row.scene}", style))
    if row.tokens:
        console.print(line(f"  replica {row.replica}, first token after {row.ttft_s * 1000:.0f} ms; tokens: {counts}"))
        console.print(line(f"  {row.question} {row.answer}", "cyan", _MOST_SHOWN))
    for words, style in [*((note, "dim") for note in row.notes), *((problem, "red") for problem in row.problems)]:
        console.print(line(f"  {words}", style))
