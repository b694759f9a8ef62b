"""Files are handed out by what they took, and each server, engine and Ray is started in one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests import durations, handing_out
from tests.durations import FileDurations, needs_of, stored
from tests.handing_out import longest_first, piece_of, rewrite_share

KNOWN = {
    "tests/a/test_short.py": FileDurations(2.0),
    "tests/a/test_long.py": FileDurations(90.0),
    "tests/b/test_server.py": FileDurations(50.0, ["server"]),
    "tests/c/test_server_too.py": FileDurations(60.0, ["server"]),
    "tests/d/test_both.py": FileDurations(1.0, ["engine", "ray"]),
}


def item(file: str, *fixtures: str) -> Any:
    return SimpleNamespace(nodeid=f"{file}::test_it", path=Path(file), fixturenames=list(fixtures))


def test_every_file_that_starts_something_is_known_to_do_so(request: pytest.FixtureRequest) -> None:
    """Else it may run in another process than those that share what it starts, which then is started twice."""
    known = {name: one.needs for name, one in stored().items() if one.needs}
    found = needs_of(request.session.items)  # type: ignore[arg-type]
    unknown = {name for name, needs in found.items() if known.get(name) != needs}
    assert unknown == set(), f'store them: make test ARGS="--store-durations {" ".join(sorted(unknown))}"'


def test_every_stored_file_exists() -> None:
    assert [name for name in stored() if not (durations.PROJECT_ROOT / name).exists()] == []


def test_files_that_share_a_server_are_one_piece_and_any_other_file_is_its_own() -> None:
    pieces = {name: piece_of(name, KNOWN) for name in [*KNOWN, "tests/test_new.py"]}
    assert pieces == {
        "tests/a/test_short.py": "tests/a/test_short.py",
        "tests/a/test_long.py": "tests/a/test_long.py",
        "tests/b/test_server.py": "server",
        "tests/c/test_server_too.py": "server",
        "tests/d/test_both.py": "engine",
        "tests/test_new.py": "tests/test_new.py",
    }


def test_the_longest_piece_comes_first_and_a_server_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_out, "stored", lambda: KNOWN)
    items = [
        item("tests/a/test_short.py"),
        item("tests/a/test_long.py"),
        item("tests/b/test_server.py", "world"),
        item("tests/b/test_server.py", "plain"),
        item("tests/c/test_server_too.py", "plain"),
        item("tests/test_new.py"),
    ]
    longest_first(items)
    order = [(one.nodeid.partition("::")[0], *one.fixturenames) for one in items]
    assert order == [
        ("tests/b/test_server.py", "plain"),
        ("tests/c/test_server_too.py", "plain"),
        ("tests/b/test_server.py", "world"),
        ("tests/a/test_long.py",),
        ("tests/test_new.py",),
        ("tests/a/test_short.py",),
    ]


def test_engines_that_need_a_ray_follow_each_other_with_the_shared_engine_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handing_out, "stored", lambda: {name: FileDurations(1.0, ["engine"]) for name in "abcdef"})
    wanted: dict[str, tuple[str, ...]] = {
        "a": ("one_engine", "engine_slot", "one_ray"),
        "b": ("one_engine", "engine_slot"),
        "c": ("one_engine", "one_ray"),
        "d": ("one_engine",),
        "e": ("one_engine", "engine_slot", "one_ray"),
        "f": ("one_engine", "one_ray"),
    }
    items = [item(name, *fixtures) for name, fixtures in wanted.items()]
    longest_first(items)
    assert "".join(one.nodeid[0] for one in items) == "baecfd"


def report(nodeid: str, seconds: float) -> Any:
    return SimpleNamespace(nodeid=nodeid, duration=seconds, failed=False)


def test_a_run_of_a_part_leaves_what_is_stored_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "STORED", tmp_path / "durations.json")
    monkeypatch.setattr(durations, "PROJECT_ROOT", tmp_path)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).touch()

    def run(*reports: Any, needs: dict[str, list[str]]) -> None:
        config: Any = SimpleNamespace(getoption=lambda name: True)
        adding = durations.Durations(config)
        adding.hand_over({"starts": [], "needs": needs, "left_out": {}})
        for each in reports:
            adding.pytest_runtest_logreport(each)
        adding.pytest_sessionfinish()

    run(report("test_one.py::test_a", 1.0), report("test_one.py::test_b", 0.01), needs={"test_one.py": ["ray"]})
    run(report("test_two.py::test_c", 3.0), report("test_two.py::test_c", 0.5), report("gone.py::test", 9), needs={})
    assert durations.stored() == {
        "test_one.py": FileDurations(1.01, ["ray"], {"test_a": 1.0}),
        "test_two.py": FileDurations(3.5, [], {"test_c": 3.5}),
    }
    assert json.loads(durations.STORED.read_text())["workers"] == {"this process": 12.5}


def test_a_test_that_fails_is_named_before_the_run_has_ended() -> None:
    shown: list[str] = []
    terminal = SimpleNamespace(ensure_newline=lambda: shown.append(""), write_line=shown.append)
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: terminal))
    failed = report("tests/test_one.py::test_a", 1.0)
    failed.failed, failed.when = True, "call"
    durations.Durations(config).pytest_runtest_logreport(failed)
    assert shown == ["", "call failed: tests/test_one.py::test_a"]


def test_each_process_rewrites_its_share_of_the_files_and_no_file_twice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["conftest.py", "test_a.py", "sub/test_b.py", "sub/test_c.py"]
    for name in [*names, "no_test.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def test() -> None:\n    assert 1 == 2\n", encoding="utf-8")
    monkeypatch.setattr(request.config, "args", [f"{tmp_path}::test"])

    def rewritten() -> dict[str, float]:
        return {path.name.partition(".")[0]: path.stat().st_ino for path in tmp_path.rglob("*.pyc")}

    rewrite_share(request.config, 0, 2)
    first = rewritten()
    assert 0 < len(first) < len(names)
    rewrite_share(request.config, 1, 2)
    rewrite_share(request.config, 0, 1)
    assert rewritten().keys() == {"conftest", "test_a", "test_b", "test_c"}
    assert first.items() <= rewritten().items()
    read = rewrite._read_pyc(tmp_path / "test_a.py", next(tmp_path.rglob("test_a*.pyc")))
    assert read is not None
    module: dict[str, Any] = {}
    exec(read, module)
    with pytest.raises(AssertionError, match="1 == 2"):
        module["test"]()
