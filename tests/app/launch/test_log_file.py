"""The server's log as JSON objects: what has a form keeps it, what has none gets one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker

from app.launch.cluster import ray_environment, write_token
from app.launch.log_file import as_object, write_objects
from configs.settings import load_settings

AT = 1_767_225_600.25  # 2026-01-01


def made(line: str) -> dict[str, Any]:
    text = as_object(line, AT)
    assert text is not None
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_an_object_keeps_what_it_has_and_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"time": "then", "level": "ERROR", "message": "a (b) {c}", "request_id": "order-1"})
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    printed = io.StringIO()  # as Ray prints it
    data: Any = {"lines": [line], "pid": 7, "actor_name": "ServeReplica:crosskv:Replica", "ip": "a", "localhost": "a"}
    worker.print_worker_logs(data, printed)
    assert "\x1b[" in printed.getvalue()
    whose = {"process": "ServeReplica:crosskv:Replica", "pid": "7"}
    assert made(printed.getvalue()) == {**json.loads(line), **whose}
    printed.truncate(0)
    printed.seek(0)
    worker.print_worker_logs({**data, "ip": "10.0.0.2"}, printed)
    assert made(printed.getvalue()) == {**json.loads(line), **whose, "ip": "10.0.0.2"}


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        (
            "2026-01-01 12:00:00,123\tINFO worker.py:1 -- Started",
            "INFO",
            "2026-01-01 12:00:00,123\tINFO worker.py:1 -- Started",
        ),
        ("\x1b[33mWARNING\x1b[0m: two", "WARNING", "WARNING: two"),
        ("Traceback (most recent call last):", "INFO", "Traceback (most recent call last):"),
        ("{not json", "INFO", "{not json"),
        ("[1, 2]", "INFO", "[1, 2]"),
        ("(a remark) of its own", "INFO", "(a remark) of its own"),
    ],
)
def test_a_line_of_text_becomes_an_object(line: str, level: str, message: str) -> None:
    assert made(line) == {"time": "2026-01-01T00:00:00.250Z", "level": level, "logger": "server", "message": message}


def test_each_line_is_written_at_once_and_an_empty_one_is_none(tmp_path: Path) -> None:
    path, seen = tmp_path / "server.log", []

    def lines() -> Any:
        for line in (b"one\n", b"\n", b"\xff\xe2\x80\xa8two\r\n"):
            yield line
            seen.append(len(path.read_bytes().splitlines()))

    write_objects(lines(), path.open("wb"))
    assert seen == [1, 1, 2]
    assert [json.loads(line)["message"] for line in path.read_bytes().splitlines()] == ["one", "\ufffd\u2028two"]


@pytest.mark.parametrize(("log_format", "kept_whole"), [("text", False), ("json", True)])
def test_ray_neither_colours_lines_nor_adds_to_objects(
    log_format: str, kept_whole: bool, model_folder: Path, tmp_path: Path
) -> None:
    settings = load_settings({"model": str(model_folder), "http": {"log_format": log_format}})
    environment = ray_environment(settings, write_token(tmp_path))
    assert environment["RAY_COLOR_PREFIX"] == "0"
    assert (environment.get("RAY_DEDUP_LOGS") == "0") == kept_whole
