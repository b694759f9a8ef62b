"""`crosskv check` says of each part what was checked, starts nothing, and its exit code says whether a start would."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.checks.before_start import Check
from app.cli.__main__ import app
from app.launch import run_folder
from app.launch.plan import Overrides, checks_before, read_plan
from tests.app.launch.stub_config import write_config
from tests.model_files import write_json, write_model


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "RUN_FOLDER", tmp_path / "runs")


def check(config: Path, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and by part its state and what was said."""
    result = CliRunner().invoke(app, ["check", str(config), "--json", *options])
    return result.exit_code, {one["part"]: (one["state"], one["said"]) for one in json.loads(result.stdout)}


def test_all_that_a_start_looks_at_is_shown_and_nothing_is_left(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder)
    code, said = check(config)
    looked_at: list[Check] = checks_before(read_plan(config, Overrides()))
    assert list(said) == ["settings", *(one.part for one in looked_at)]
    assert {state for state, _ in said.values()} == {"ok"}
    assert all(words for _, words in said.values())
    assert code == 0
    assert not (tmp_path / "runs").exists()


def test_what_cannot_work_is_told_with_the_rest(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_json(folder / "tokenizer_config.json", {})
    args: dict[str, Any] = {"engine": {"tool_call_parser": "hermess"}, "kv": {"redis_url": "redis://127.0.0.1:1"}}
    code, said = check(write_config(tmp_path, folder, **args))
    assert {part: state for part, (state, _) in said.items() if state != "ok"} == {
        "chat_template": "cannot",
        "engine": "cannot",
        "kv.redis_url": "lacks",
    }
    assert code == 2


def test_a_server_that_would_lack_something_is_no_failure(tmp_path: Path, model_folder: Path) -> None:
    code, said = check(write_config(tmp_path, model_folder, kv={"redis_url": "redis://127.0.0.1:1"}))
    assert (code, said["kv.redis_url"][0]) == (1, "lacks")


def test_a_file_that_holds_no_settings_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
    assert result.stderr.count("\n") == 1


def test_options_take_the_place_of_the_files_values(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = check(config, "--port", str(taken.getsockname()[1]), "--model", "Qwen/Qwen3-8B")
    assert said["http_options.port"][0] == "cannot"
    assert "hub" in said["model"][1]
    assert code == 2


def test_a_server_that_was_started_from_here_is_the_one_to_take_the_place_of(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = write_config(tmp_path, model_folder, port=listening.getsockname()[1])
        assert check(config)[0] == 2
        plan = read_plan(config, Overrides())
        plan.run_folder.mkdir(parents=True)
        (plan.run_folder / "serve_config.yaml").write_text(config.read_text())
        monkeypatch.setattr(run_folder, "find_launcher", lambda port: object())
        code, said = check(config)
    assert (code, said["http_options.port"][1]) == (0, f"127.0.0.1:{plan.port} is the running server's")


def test_a_person_reads_a_table(tmp_path: Path, model_folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(write_config(tmp_path, model_folder))])
    assert result.exit_code == 0
    assert "http_options.port" in result.stdout
