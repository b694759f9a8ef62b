"""What each command asks of a server, and shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from stand_in import StandIn, error, recorded
from typer.testing import CliRunner, Result

from app.cli import clear as clearing
from app.cli import top
from app.cli.__main__ import app

Run = Callable[..., Result]


def test_status_shows_parts_tiers_and_where_tokens_came_from(crosskv: Run, server: StandIn) -> None:
    result = crosskv("status")
    assert result.exit_code == 0, result.output
    assert f"{server.url} is ok" in result.output
    for part in ("ingress", "kv_manager", "replicas", "cpu_tier", "redis"):
        assert part in result.output
    assert "12.7 MiB" in result.output  # 13,287,360 bytes in the CPU tier
    assert "device 40 %" in result.output  # 9,728 of 24,112


def test_status_as_json_is_what_the_server_said(crosskv: Run) -> None:
    said = json.loads(crosskv("status", "--json").stdout)
    assert said["health"] == recorded("health")
    assert said["stats"] == recorded("stats")
    assert said["prompt_tokens"] == {"device": 9728, "cpu": 6688, "redis": 1824, "recomputed": 5872}


def test_status_of_a_degraded_server_is_1(crosskv: Run, server: StandIn) -> None:
    server.answers["/health"] = (200, {"status": "degraded", "parts": {"redis": {"state": "it is away"}}})
    result = crosskv("status")
    assert result.exit_code == 1
    assert "it is away" in result.output


def test_status_of_a_server_that_serves_nothing_is_shown_too(crosskv: Run, server: StandIn) -> None:
    server.answers["/health"] = (503, {"status": "unavailable", "parts": {}})
    server.answers["/api/v1/kv/stats"] = error("The KV manager does not answer.", 503)
    result = crosskv("status")
    assert result.exit_code == 1
    assert "is unavailable" in result.output
    assert "KV manager does not answer" in result.output


def test_status_shows_a_tenant_its_own_share(crosskv: Run, server: StandIn) -> None:
    server.answers["/health"] = (200, {"status": "ok"})
    server.answers["/metrics"] = error("This key may not read it.", 403)
    tiers = {"cpu": {"segments": 7, "bytes": 2 * 1024**2, "quota_bytes": None}}
    server.answers["/api/v1/kv/stats"] = (200, {"tenant": "acme", "tiers": tiers, "pins": 0})
    result = crosskv("status")
    assert result.exit_code == 0
    assert "2.0 MiB" in result.output
    assert "prompt tokens" not in result.output


@pytest.mark.parametrize("arguments", [("top",), ("top", "--once")])
def test_top_without_a_terminal_prints_one_frame(crosskv: Run, arguments: tuple[str, ...]) -> None:
    result = crosskv(*arguments)
    assert result.exit_code == 0, result.output
    assert "0 prompts ongoing, 0 waiting; first token after 0.034 s" in result.output
    assert "recomputed" in result.output
    assert result.output.count("crosskv at") == 1
    assert "\x1b" not in result.output


def test_top_goes_on_when_the_server_goes_away_and_ends_on_ctrl_c(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = server.answers["/metrics"][1]
    happenings = iter(
        [
            (200, metrics.replace('redis"} 1824.0', 'redis"} 1924.0')),
            error("It ends.", 503),
            KeyboardInterrupt(),
        ]
    )

    def sleep(seconds: float) -> None:
        happens = next(happenings)
        if isinstance(happens, KeyboardInterrupt):
            raise happens
        server.answers["/metrics"] = happens

    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr(top, "Console", lambda: Console(file=sys.stdout, force_terminal=True, width=200))
    result = CliRunner().invoke(app, ["top", "--url", server.url])
    assert result.exit_code == 0, result.output
    frames = result.output.split("crosskv at")[1:]
    assert len(frames) >= 3
    assert "1924" not in result.output, "rates, not totals"
    assert any(re.search(r"redis\s+100\s+100 %", frame) for frame in frames)
    assert "failed with 503: It ends." in frames[-1]


def test_top_as_json(crosskv: Run) -> None:
    said = json.loads(crosskv("top", "--json").stdout)
    assert said["plans"]["hit"] == 16
    assert said["tiers"] == {"cpu": 13287360, "redis": 18602304}


def test_lookup_shows_tiers_and_segments(crosskv: Run, server: StandIn) -> None:
    result = crosskv("lookup", "Anna lives in Oslo.", "--cache-salt", "s", "--fidelity", "tolerant")
    assert result.exit_code == 0, result.output
    sent = server.sent("/api/v1/kv/lookup")
    assert sent == {"text": ["Anna lives in Oslo."], "cache_salt": ["s"], "fidelity": ["tolerant"]}
    assert "634 tokens" in result.output
    assert "device of replica 1" in result.output
    assert "96 %" in result.output
    assert "512-608" in result.output
    assert "pinned" in result.output


def test_lookup_says_where_a_model_with_states_can_be_resumed(crosskv: Run, server: StandIn) -> None:
    assert "states" not in crosskv("lookup", "Anna").output
    found = recorded("lookup")
    for segment in found["segments"]:
        segment["landings"] = []
    found["segments"][1]["landings"] = [{"end": 12, "end_token": 384, "tiers": ["cpu", "redis"]}]
    server.answers["/api/v1/kv/lookup"] = (200, {**found, "landing": 12, "landing_token": 384})
    output = " ".join(crosskv("lookup", "Anna").output.split())
    assert "can be loaded, with the states 384 61 %" in output
    assert output.count("resumes at 384 (cpu, redis)") == 1


def test_an_adapters_prompt_is_named_by_its_model(crosskv: Run, server: StandIn) -> None:
    assert crosskv("lookup", "Anna", "--model", "support").exit_code == 0
    assert server.sent("/api/v1/kv/lookup") == {"text": ["Anna"], "model": ["support"]}
    assert crosskv("pin", "Anna", "--model", "support").exit_code == 0
    assert server.sent("/api/v1/kv/pin")["model"] == "support"
    assert crosskv("unpin", "Anna", "--model", "support").exit_code == 0
    assert server.sent("/api/v1/kv/unpin") == {"text": "Anna", "model": "support"}


def test_lookup_of_what_is_stored_nowhere_is_1(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/kv/lookup"] = (200, recorded("lookup_unknown"))
    assert crosskv("lookup", "unknown").exit_code == 1
    assert crosskv("lookup", "unknown", "--json").exit_code == 1


def test_lookup_reads_standard_input_and_names_a_chat(crosskv: Run, server: StandIn) -> None:
    assert crosskv("lookup", "-", "--chat", input="Where is\nthe ball?").exit_code == 0
    (messages,) = server.sent("/api/v1/kv/lookup")["messages"]
    assert json.loads(messages) == [{"role": "user", "content": "Where is\nthe ball?"}]


def test_a_text_may_look_like_an_option(crosskv: Run, server: StandIn) -> None:
    assert crosskv("lookup", "--", "--url").exit_code == 0
    assert server.sent("/api/v1/kv/lookup") == {"text": ["--url"]}


def test_an_empty_text_is_not_sent(crosskv: Run, server: StandIn) -> None:
    result = crosskv("lookup", "")
    assert (result.exit_code, server.requests) == (2, [])
    assert "TEXT is empty" in result.stderr


def test_pin_and_unpin_name_the_prompt_as_its_requests_do(crosskv: Run, server: StandIn) -> None:
    result = crosskv("pin", "Anna", "--ttl-s", "60", "--cache-salt", "s", "--fidelity", "tolerant")
    assert result.exit_code == 0, result.output
    assert "pinned for 60 s (segments: 3" in result.output
    named = {"text": "Anna", "cache_salt": "s", "kv_cache": {"fidelity": "tolerant"}}
    assert server.sent("/api/v1/kv/pin") == {**named, "ttl_s": 60}
    assert crosskv("unpin", "Anna", "--chat").exit_code == 0
    assert server.sent("/api/v1/kv/unpin") == {"messages": [{"role": "user", "content": "Anna"}]}


def test_a_refused_pin_is_1_and_says_why(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/kv/pin"] = error("Nothing is known of this prompt.", 404)
    result = crosskv("pin", "Anna")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "The server refused: Nothing is known of this prompt.\n"


def asked(crosskv: Run, monkeypatch: pytest.MonkeyPatch, answer: str) -> Result:
    """`crosskv clear` before a person who answers that."""
    monkeypatch.setattr(clearing, "somebody_is_there", lambda: True)
    return crosskv("clear", "cpu", "device", "cpu", input=answer)


def cleared(server: StandIn) -> list[Any]:
    """What was sent to the route that clears."""
    return [body for path, body, _ in server.requests if path == "/api/v1/kv/clear"]


def test_clear_says_what_would_go_and_does_it_when_somebody_agrees(
    crosskv: Run, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"0": {"blocks": 30}, "1": {"blocks": 12}}
    would = {"cpu": {"segments": 19, "bytes": 13287360}, "device": device}
    server.answers["/api/v1/kv/clear"] = (200, {"dry_run": True, "would": would})
    result = asked(crosskv, monkeypatch, "y\n")
    assert result.exit_code == 0, result.output
    assert "all tenants' KV in cpu (19 segments, 12.7 MiB), device (42 blocks) of" in result.stderr
    tiers = {"tiers": ["cpu", "device"]}
    assert cleared(server) == [{**tiers, "dry_run": True}, tiers]


@pytest.mark.parametrize("would", [None, [], {"cpu": 5, "device": None}, {"cpu": None}, {"device": {"0": 3}}])
def test_clear_asks_also_where_a_server_does_not_tell_how_much(
    crosskv: Run, server: StandIn, monkeypatch: pytest.MonkeyPatch, would: Any
) -> None:
    server.answers["/api/v1/kv/clear"] = (200, {"would": would})
    server.answers["/api/v1/kv/stats"] = (200, {"tenant": "alice"})
    result = asked(crosskv, monkeypatch, "n\n")
    assert result.exit_code == 1
    assert "your tenant's KV in cpu, device" in result.stderr


def test_clear_changes_nothing_when_somebody_does_not_agree(
    crosskv: Run, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in ("n\n", "\n", ""):
        assert asked(crosskv, monkeypatch, answer).exit_code == 1
    assert len(cleared(server)) == 3
    assert all(body["dry_run"] for body in cleared(server))


def test_clear_changes_nothing_where_nobody_can_be_asked(crosskv: Run, server: StandIn) -> None:
    result = crosskv("clear", "redis", input="y\n")
    assert (result.exit_code, server.requests) == (2, [])
    assert "--yes" in result.stderr


def test_clear_with_yes_asks_nobody(crosskv: Run, server: StandIn) -> None:
    assert crosskv("clear", "redis", "--yes").exit_code == 0
    assert [path for path, _, _ in server.requests] == ["/api/v1/kv/clear"]


@pytest.mark.parametrize("arguments", [(), ("disk",), ("--yes",)])
def test_clear_wants_tiers_that_there_are(crosskv: Run, server: StandIn, arguments: tuple[str, ...]) -> None:
    assert crosskv("clear", *arguments).exit_code == 2
    assert server.requests == []


NODES: list[dict[str, Any]] = [
    {
        "id": "aa" * 16, "parent": None, "kind": "request", "tokens": 256, "uses": 7.5, "hotness": 3.0, "bytes": 786432,
        "tiers": {"device": [0, 1], "cpu": True, "redis": False}, "pinned": True, "children": 2, "hidden": 0,
    },
    {
        "id": "bb" * 16, "parent": "aa" * 16, "kind": "answer", "tokens": 64, "uses": 1.0, "hotness": 0.5, "bytes": 99,
        "tiers": {"device": [], "cpu": True, "redis": True}, "pinned": False, "children": 0, "hidden": 0,
    },
    {
        "id": "cc" * 16, "parent": "aa" * 16, "kind": "request", "tokens": 32, "uses": 4.0, "hotness": 2.0, "bytes": 0,
        "tiers": {}, "pinned": False, "children": 9, "hidden": 9,
    },
]  # fmt: skip


def test_trie_shows_children_below_parents_the_hottest_first(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/kv/trie"] = (200, {"nodes": NODES})
    result = crosskv("trie", "--root", "aa" * 16, "--depth", "3", "--most", "50")
    assert result.exit_code == 0, result.output
    assert server.sent("/api/v1/kv/trie") == {"root": ["aa" * 16], "depth": ["3"], "most": ["50"]}
    lines = result.output.splitlines()
    assert [next(key for key in ("aa", "bb", "cc") if key * 6 in line) for line in lines[1:]] == ["aa", "cc", "bb"]
    assert "device 0,1; cpu" in lines[1]
    assert "pinned" in lines[1]
    assert "+9 hidden" in lines[2]
    assert "stored nowhere" in lines[2]
    assert lines[2].index("cc") > lines[1].index("aa")
    assert "resumes" not in result.output
    landings = [{"end_token": tokens, "tiers": {"cpu": 9, "redis": 0}} for tokens in (128, 256)]
    server.answers["/api/v1/kv/trie"] = (200, {"nodes": [{**NODES[0], "landings": landings}]})
    assert "resumes at 128 resumes at 256 pinned" in crosskv("trie").output


@pytest.mark.parametrize(("beginning", "whole"), [("bbbb", "bb" * 16), ("BB", "bb" * 16), ("b1", None), ("", None)])
def test_a_root_is_named_by_what_is_shown_of_it(
    crosskv: Run, server: StandIn, beginning: str, whole: str | None
) -> None:
    server.answers["/api/v1/kv/trie"] = (200, {"nodes": NODES})
    result = crosskv("trie", "--root", beginning)
    assert result.exit_code == (0 if whole else 1)
    asked_for = [sent.get("root") for _, sent, _ in server.requests]
    assert asked_for == ([None, [whole]] if whole else [None])


def test_trie_ends_on_a_circle_and_shows_orphans(crosskv: Run, server: StandIn) -> None:
    parents = {"a": "b", "b": "a", "c": "gone", "d": "d"}
    circle = [{"id": node, "parent": parent} for node, parent in parents.items()]
    server.answers["/api/v1/kv/trie"] = (200, {"nodes": circle})
    result = crosskv("trie")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 3
    twice = [{"id": "a"}, {"id": "b", "parent": "a"}, {"id": "a", "parent": "b"}]
    server.answers["/api/v1/kv/trie"] = (200, {"nodes": twice})
    assert len(crosskv("trie").output.splitlines()) == 3
