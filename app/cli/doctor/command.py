"""`crosskv doctor`: looks, and says what to change and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from app.cli.doctor.advice import Advice, Rule, Severity
from app.cli.doctor.figures import LEAST_PROMPTS, Figures, Setup
from app.cli.doctor.gathered import setup_of, traffic_of
from app.cli.doctor.rules import mistakes, reuse, storage
from app.cli.doctor.rules.extensions import chunks
from app.cli.doctor.rules.ordinary_text import PAGE
from app.cli.failures import NOT_SO, CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import ServerClient, connect
from app.cli.terminal import line, print_json

SETTINGS, TOKENIZE = "/api/v1/settings", "/tokenize"
_STYLES = {Severity.WARNING: "yellow", Severity.INFO: "cyan"}


@tells_failures
def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="Look at the settings of this file, not at the server's; the server may be away then."),
    ] = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say what to change and why, from live figures. Exit code 0: nothing, 1: advice, 2: it could not look."""
    with connect(url, key_file) as server:
        figures, notes = _look(server, config)
    diagnosis = examine(figures)
    if as_json:
        print_json(Console(), _as_data(server.url, figures, diagnosis, notes))
    else:
        _show(Console(soft_wrap=True), figures, diagnosis, notes)
    if diagnosis.advice:
        raise typer.Exit(NOT_SO)


def _look(server: ServerClient, config: Path | None) -> tuple[Figures, list[str]]:
    """The figures, and what could not be seen, in words. Raises CommandError."""
    notes: list[str] = []
    setup = None
    if config is not None:
        from app.cli.doctor.settings_file import setup_from  # reads the model's files; a server's answer needs none

        setup = setup_from(config)
    else:
        setup = _ask_settings(server, notes)
        if setup is not None and setup.separators_of_tokens:
            setup = replace(setup, page_tokens=_ask_page_tokens(server))
    if setup is not None and setup.separators_of_tokens and setup.page_tokens is None:
        notes.append("Separators that are token ids were not judged: the tokens of a page of text are not known.")
    try:
        metrics, stats = server.metrics(), server.get("/api/v1/kv/stats")
        if "tenant" in stats:
            raise CommandError("The doctor looks at all tenants' figures: give it an administrator's key.")
    except CommandError as error:
        if config is None:
            raise
        return Figures(setup=setup), [*notes, f"{error} Only the settings were looked at."]
    return Figures(traffic_of(metrics, stats, setup), setup), notes


def _ask_settings(server: ServerClient, notes: list[str]) -> Setup | None:
    """None, with a note, of a server that does not tell its settings yet."""
    try:
        return setup_of(server.get(SETTINGS))
    except CommandError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        notes.append("The server does not tell its settings: give --config, or there is little to advise.")
        return None


def _ask_page_tokens(server: ServerClient) -> list[int] | None:
    """A page of ordinary text as the model's tokens; None of a server that does not tell, or has no room for it."""
    try:
        told = server.post(TOKENIZE, {"prompt": PAGE, "add_special_tokens": False}).get("tokens")
    except CommandError:
        return None
    return told if isinstance(told, list) else None


def _as_data(url: str, figures: Figures, diagnosis: Diagnosis, notes: list[str]) -> dict[str, Any]:
    traffic = figures.traffic
    return {
        "url": url,
        "seen": {"prompts": traffic.prompts, "hit_rate": traffic.hit_rate, "ttft_s": traffic.ttft_s},
        "advice": [asdict(one, dict_factory=_plain_values) for one in diagnosis.advice],
        "not_enough_seen": list(diagnosis.not_enough_seen),
        "notes": notes,
    }


def _plain_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in pairs}


def _show(console: Console, figures: Figures, diagnosis: Diagnosis, notes: list[str]) -> None:
    traffic = figures.traffic
    ttft = "" if traffic.ttft_s is None else f", first token after {traffic.ttft_s:.2f} s"
    console.print(line(f"{traffic.prompts} prompts, {traffic.hit_rate:.0%} of their tokens reused{ttft}"))
    for note in notes:
        console.print(line(note))
    for one in diagnosis.advice:
        console.print()
        _show_one(console, one)
    if diagnosis.not_enough_seen:
        unseen = ", ".join(diagnosis.not_enough_seen)
        console.print()
        console.print(line(f"not enough seen yet ({LEAST_PROMPTS} prompts are needed) for: {unseen}"))
    elif not diagnosis.advice:
        console.print(line("nothing to change"))


def _show_one(console: Console, one: Advice) -> None:
    head = Text.assemble((one.severity.value, _STYLES[one.severity]), " ", (one.name, "bold"))
    console.print(head)
    change = ("set", f"{one.setting}: {one.value}") if one.setting else ("do", one.value)
    with_it = (("with", f"{name}: {value}") for name, value in one.also.items())
    for name, value in (("seen", one.evidence), change, *with_it, ("why", one.why), ("more", one.page)):
        console.print(Text.assemble((f"  {name:<5}", "dim"), line(value)))


RULES = (
    Rule(mistakes.slow_dtype, needs_traffic=False),
    Rule(mistakes.more_threads_than_cores, needs_traffic=False),
    Rule(mistakes.cpu_tier_below_device_pool, needs_traffic=False),
    *chunks.OF_SETTINGS,
    Rule(storage.compress_cold_data, needs_traffic=True),
    Rule(storage.compressing_hot_data, needs_traffic=True),
    Rule(reuse.volatile_heads, needs_traffic=True),
    *chunks.OF_TRAFFIC,
    Rule(reuse.keep_kv_longer, needs_traffic=True),
    Rule(reuse.tier_slower_than_recompute, needs_traffic=True),
    Rule(reuse.hide_loads, needs_traffic=True),
)

_ORDER = list(Severity)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`advice`: the gravest first. `not_enough_seen`: names of rules that need more traffic than there was."""

    advice: tuple[Advice, ...]
    not_enough_seen: tuple[str, ...]


def examine(figures: Figures) -> Diagnosis:
    """What the rules say."""
    enough = figures.traffic.enough
    found = [rule.advise(figures) for rule in RULES if enough or not rule.needs_traffic]
    advice = sorted((one for one in found if one is not None), key=lambda one: _ORDER.index(one.severity))
    unseen = [] if enough else [rule.name for rule in RULES if rule.needs_traffic]
    return Diagnosis(tuple(advice), tuple(unseen))
