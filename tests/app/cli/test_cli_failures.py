"""What goes wrong is one line and an exit code, and nothing that a server says is obeyed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in import StandIn, error, recorded
from typer.testing import CliRunner, Result

from app.cli import server as http
from app.cli.__main__ import app
from app.cli.terminal import plain

Run = Callable[..., Result]

COMMANDS = [
    ("status",),
    ("top", "--once"),
    ("lookup", "Anna"),
    ("pin", "Anna"),
    ("unpin", "Anna"),
    ("clear", "cpu", "--yes"),
    ("trie",),
    ("doctor",),
]
ALL = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


def one_line(result: Result, exit_code: int) -> str:
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@ALL
def test_a_server_that_is_away(command: tuple[str, ...]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        said = one_line(CliRunner().invoke(app, [*command, "--url", url]), 2)
    assert said == f"No server answers at {url}: start one with `crosskv serve`, or give its --url.\n"


@ALL
@pytest.mark.parametrize(
    ("status", "expected"),
    [(401, "CROSSKV_API_KEY"), (403, "may not do that: no, sorry"), (429, "too much to do: no, sorry")],
)
def test_a_key_that_is_refused_and_a_server_that_is_busy(
    crosskv: Run, server: StandIn, command: tuple[str, ...], status: int, expected: str
) -> None:
    server.answers = dict.fromkeys([*server.answers, "/api/v1/kv/trie", "/api/v1/settings"], error("no, sorry", status))
    server.answers["/health"] = (200, {"status": "ok"})
    assert expected in one_line(crosskv(*command), 2)


@ALL
@pytest.mark.parametrize("body", ["<html>hello</html>", "[1, 2]", '"text"', "null", ""])
def test_what_answers_is_no_crosskv(crosskv: Run, server: StandIn, command: tuple[str, ...], body: str) -> None:
    server.answers = dict.fromkeys([*server.answers, "/api/v1/kv/trie", "/api/v1/settings"], (200, body))
    assert "is not crosskv" in one_line(crosskv(*command), 2)


@ALL
def test_a_server_that_fails(crosskv: Run, server: StandIn, command: tuple[str, ...]) -> None:
    server.answers = dict.fromkeys([*server.answers, "/api/v1/kv/trie", "/api/v1/settings"], (500, "broken"))
    server.answers["/health"] = (503, "no ingress")
    assert one_line(crosskv(*command), 2)


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "does not answer" in one_line(CliRunner().invoke(app, ["status", "--url", url]), 2)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://[::1", "http://a:b", "\x1b[31m"]
)
def test_what_is_no_url(url: str) -> None:
    said = one_line(CliRunner().invoke(app, ["status", "--url", url]), 2)
    assert "\x1b" not in said


def test_a_key_comes_from_a_file_or_the_environment(crosskv: Run, server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_text("from-the-file\nnot this\n")
    crosskv("status", "--key-file", str(file))
    assert {key for _, _, key in server.requests} == {"Bearer from-the-file"}
    server.requests.clear()
    CliRunner().invoke(app, ["status", "--url", server.url], env={"CROSSKV_API_KEY": "from-the-environment"})
    assert {key for _, _, key in server.requests} == {"Bearer from-the-environment"}
    server.requests.clear()
    crosskv("status")
    assert {key for _, _, key in server.requests} == {None}


@ALL
def test_a_key_is_no_option(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--api-key", "secret"])
    assert result.exit_code == 2
    assert "No such option" in result.stderr


@pytest.mark.parametrize("content", ["", "\n", "two words", "ümlaut", "a\x00b", "a\x1b[0m"])
def test_what_is_no_key_is_not_sent(crosskv: Run, server: StandIn, tmp_path: Path, content: str) -> None:
    file = tmp_path / "key.txt"
    file.write_text(content)
    said = one_line(crosskv("status", "--key-file", str(file)), 2)
    assert content.strip() == "" or content not in said
    assert "\x1b" not in said
    assert server.requests == []


def test_a_key_file_that_is_not_there(crosskv: Run, tmp_path: Path) -> None:
    assert "cannot be read" in one_line(crosskv("status", "--key-file", str(tmp_path / "none")), 2)
    assert "cannot be read" in one_line(crosskv("status", "--key-file", str(tmp_path)), 2)


def test_a_key_goes_to_no_other_place(crosskv: Run, server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_text("secret")
    server.answers["/api/v1/kv/stats"] = (307, "")
    server.headers["Location"] = f"{server.url}/elsewhere"
    crosskv("status", "--key-file", str(file))
    assert "/elsewhere" not in [path for path, _, _ in server.requests]


HOSTILE = (
    "[bold red]x[/] [link=http://evil]y[/link] :smile: \x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u200b\r\n\ttail"
)


def harmless(text: str) -> bool:
    """Whether markup stands as it came, and no terminal or reader of text is steered."""
    steering = {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\u200b"}
    return "[bold red]x[/]" in text and ":smile:" in text and not steering & set(text)


def test_text_of_a_server_is_shown_as_it_is(crosskv: Run, server: StandIn) -> None:
    stats, found = recorded("stats"), recorded("lookup")
    stats["locations"][0]["tier"] = HOSTILE
    found["segments"][0]["kind"] = HOSTILE
    found["segments"][0]["tiers"] = [HOSTILE]
    server.answers["/api/v1/kv/stats"] = (200, stats)
    server.answers["/api/v1/kv/lookup"] = (200, found)
    server.answers["/api/v1/kv/pin"] = (200, {HOSTILE: HOSTILE})
    server.answers["/api/v1/kv/clear"] = error(HOSTILE, 409)
    server.answers["/health"] = (200, {"status": "ok", "parts": {HOSTILE: {"state": HOSTILE}}})
    server.answers["/api/v1/kv/trie"] = (
        200,
        {"nodes": [{"id": HOSTILE, "kind": HOSTILE, "tiers": {HOSTILE: [HOSTILE]}}]},
    )
    for command in (*COMMANDS[:4], ("clear", "cpu", "--yes"), ("trie",)):
        assert harmless(crosskv(*command).output), command


@pytest.mark.parametrize("command", ["status", "lookup Anna", "pin Anna", "trie"])
def test_json_is_ascii(crosskv: Run, server: StandIn, command: str) -> None:
    answer = {"status": "ok", "hostile": HOSTILE, "half": "\ud800", "nodes": [{"id": HOSTILE}]}
    server.answers = dict.fromkeys([*server.answers, "/api/v1/kv/trie"], (200, answer))
    output = crosskv(*command.split(), "--json").output
    assert output.isascii()
    assert "\\u001b]0;owned" in output
    assert "\x1b" not in output


def test_plain_text_is_one_short_line() -> None:
    assert plain("a\nb\u2028c\td\x00\ud800") == "a b c d��"
    assert plain("é日本") == "é日本"
    assert len(plain("x" * 10_000)) < 500
