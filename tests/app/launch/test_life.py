"""What the terminal says when a server is ready and while it ends, with a stand-in for the server."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from app.launch import run_folder
from app.launch.life import Life, ServerError
from app.launch.plan import LaunchPlan, Overrides, make_plan
from app.launch.progress import StartProgress, StartWatch, last_start, note_start, ready_text
from app.launch.server import Server
from configs.settings import SettingsError
from tests.app.launch.stub_config import write_config


class Asked:
    """`Signals` that ask for what a test wants."""

    def __init__(self, *, stop: bool = False, restart: bool = False) -> None:
        self.impatient = threading.Event()
        self.stop = stop
        self.restart = restart

    def wait_for_stop(self, timeout_s: float) -> bool:
        return self.stop

    def take_restart(self) -> bool:
        taken, self.restart = self.restart, False
        return taken


class Later(Asked):
    """Asks for a stop at the fourth look."""

    looks = 0

    def wait_for_stop(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.looks > 3


class Ending:
    """A `Server` that runs until it is stopped, which takes long."""

    log_path = Path("server.log")
    exit_code: int | None = None

    def __init__(self, killed: int = 0, on_stop: Callable[[], None] = lambda: None) -> None:
        self.status: dict[str, Any] = {"phase": "app", "status": "RUNNING", "deployments": {}, "message": ""}
        self.killed = killed
        self.on_stop = on_stop
        self.stopped = False

    def start(self) -> None:
        pass

    def look(self) -> None:
        pass

    def stop(self, impatient: threading.Event, takes_long: Callable[[], None]) -> int:
        self.on_stop()
        takes_long()
        self.stopped = True
        return self.killed

    def last_lines(self, count: int) -> list[str]:
        return ["its last words"]


class Ready:
    """A `Readiness` that sees `running` requests, and finds one of `ailments` after the other; the last one stays."""

    def __init__(self, running: int | None, *ailments: list[str] | None) -> None:
        self.running = running
        self.indexed_after = 0
        self.found = list(ailments) or [[]]

    def is_healthy(self) -> bool:
        return True

    def gives_a_token(self) -> bool:
        return True

    def indexing(self) -> bool:
        self.indexed_after -= 1
        return self.indexed_after >= 0

    def ailments(self) -> list[str] | None:
        return self.found.pop(0) if self.found[1:] else self.found[0]

    def requests(self) -> int | None:
        return self.running

    def close(self) -> None:
        pass


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    monkeypatch.setattr(run_folder, "RUN_FOLDER", tmp_path / "runs")
    return make_plan(write_config(tmp_path, model_folder), Overrides())


def play(
    plan: LaunchPlan,
    asked: Asked,
    server: Ending,
    running: int | None,
    refuses: str = "",
    ailments: Sequence[list[str] | None] = (),
) -> tuple[LaunchPlan | None, str]:
    """Run a life. Returns the next one's plan, and what was said."""
    said = io.StringIO()
    console = Console(file=said, highlight=False, soft_wrap=True)

    def read_again(running_plan: LaunchPlan) -> LaunchPlan:
        assert running_plan is plan
        if refuses:
            asked.stop = True
            raise SettingsError(refuses)
        return plan

    life: Any = Life(plan, asked, read_again, console, console)  # type: ignore[arg-type]
    life._server, life._readiness = server, Ready(running, *ailments)
    try:
        return life.run(), said.getvalue()
    except ServerError:
        return None, said.getvalue()
    finally:
        assert server.stopped


def test_a_stop_says_for_how_many_requests_it_waits(plan: LaunchPlan) -> None:
    following, said = play(plan, Asked(stop=True), Ending(), 3)
    assert following is None
    assert said == "stopping …\nwaiting for running requests (3); Ctrl-C again ends them\nstopped\n"


@pytest.mark.parametrize("running", [None, 0])
def test_a_stop_that_takes_long_for_unknown_reasons_says_so_too(plan: LaunchPlan, running: int | None) -> None:
    said = play(plan, Asked(stop=True), Ending(), running)[1]
    assert said == "stopping …\nstill waiting: Serve lets running requests end; Ctrl-C again ends everything\nstopped\n"


def test_processes_that_were_killed_are_counted(plan: LaunchPlan) -> None:
    said = play(plan, Asked(stop=True), Ending(killed=2), 1)[1]
    assert said.endswith("stopped (2 processes did not end by themselves and were killed)\n")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([None, ["redis: gone"]], "redis: gone\n"),  # silence is no health: it is asked again
        ([["redis: gone"], []], ""),
        ([None], "the server does not answer /health\n"),
    ],
)
def test_what_is_not_well_is_told_once_it_serves(plan: LaunchPlan, found: list[list[str] | None], told: str) -> None:
    said = play(plan, Later(), Ending(), 0, ailments=found)[1]
    assert said.partition("server.log\n\n")[2].startswith(f"{told}stopping")


@pytest.mark.parametrize(("patience_s", "left"), [(3600.0, -1), (0.0, 2)])
def test_it_is_ready_when_what_redis_holds_can_be_reused_or_takes_too_long(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch, patience_s: float, left: int
) -> None:
    monkeypatch.setattr("app.launch.life._INDEXING_S", patience_s)
    said = io.StringIO()
    console = Console(file=said, highlight=False, soft_wrap=True)
    asked, server, ready = Later(), Ending(), Ready(0)
    asked.looks, ready.indexed_after = -5, 2
    life: Any = Life(plan, asked, lambda running: running, console, console)  # type: ignore[arg-type]
    life._server, life._readiness = server, ready
    life.run()
    assert "(ready after" in said.getvalue()
    assert ready.indexed_after == left
    assert ("reading what Redis holds" in said.getvalue()) == (left < 0)


def test_a_step_that_takes_several_looks_is_told_once(plan: LaunchPlan) -> None:
    answers = [False, False, False, True]

    class AtLast(Ready):
        def gives_a_token(self) -> bool:
            return answers.pop(0)

    said = io.StringIO()
    console = Console(file=said, highlight=False, soft_wrap=True)
    asked = Later()
    asked.looks = -5
    life: Any = Life(plan, asked, lambda running: running, console, console)  # type: ignore[arg-type]
    life._server, life._readiness = Ending(), AtLast(0)
    life.run()
    assert "(ready after" in said.getvalue()
    assert said.getvalue().count("✓") == said.getvalue().count("answering a first chat") == 1


def test_a_restart_gives_the_next_plan(plan: LaunchPlan) -> None:
    following, said = play(plan, Asked(restart=True), Ending(), 0)
    assert following is plan
    assert said.startswith("restarting: stopping …\n")


def test_a_stop_that_is_asked_for_during_a_restart_wins(plan: LaunchPlan) -> None:
    asked = Asked(restart=True)
    assert play(plan, asked, Ending(on_stop=lambda: setattr(asked, "stop", True)), 0)[0] is None


def test_a_configuration_that_cannot_work_is_said_and_nothing_is_restarted(plan: LaunchPlan) -> None:
    following, said = play(plan, Asked(restart=True), Ending(), 1, refuses="replicas: [x] is no number.")
    assert following is None
    assert said.startswith("replicas: [x] is no number.\nNot restarted: the server goes on")
    assert "restarting" not in said


def test_a_server_that_ended_by_itself_says_its_last_words_before_it_is_tidied_up(plan: LaunchPlan) -> None:
    server = Ending()
    server.exit_code = 3
    following, said = play(plan, Asked(), server, 0)
    assert following is None
    assert said.startswith("its last words\n\nThe server ended by itself (exit code 3)")
    assert said.index("exit code") < said.index("stopping")


def test_a_terminal_that_is_gone_does_not_keep_the_server_from_being_stopped(plan: LaunchPlan) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    server = Ending()
    console = Console(file=Gone())
    life: Any = Life(plan, Asked(stop=True), lambda running: running, console, console)  # type: ignore[arg-type]
    life._server, life._readiness = server, Ready(0)
    with pytest.raises(OSError, match="Input/output"):
        life.run()
    assert server.stopped


@pytest.mark.usefixtures("each_processor")
def test_a_key_is_shown_on_a_terminal_and_in_no_log(tmp_path: Path, model_folder: Path) -> None:
    http = {"api_keys": {"the-secret-key": "acme"}}
    plan = make_plan(write_config(tmp_path, model_folder, http=http), Overrides())
    assert "Bearer the-secret-key" in ready_text(plan, 1.0, on_terminal=True)
    logged = ready_text(plan, 1.0, on_terminal=False)
    assert "the-secret-key" not in logged
    assert "Bearer YOUR_KEY" in logged


def failing(*, error: str, left: int, name: str = "Ingress", kind: str = "replica") -> dict[str, Any]:
    """Serve's status while it tries a part again."""
    said = f"A {kind} failed to start with exception. Retrying {left} more time(s). Error:\n{error}"
    part = {"running": 0, "target": 1, "status": "UPDATING", "message": said}
    well = {"running": 1, "target": 1, "status": "HEALTHY", "message": ""}
    return {"phase": "app", "status": "DEPLOYING", "message": "", "deployments": {"Well": well, name: part}}


TRACEBACK = "Traceback (most recent call last):\n  File x\nAssertionError: needs at least one cacheable group\n"
NO_WORKERS: Callable[[], list[str]] = list


@pytest.mark.parametrize("kind", ["replica", "deployment actor"])
def test_a_part_that_fails_twice_in_the_same_words_ends_the_start_with_them(kind: str) -> None:
    watch = StartWatch()
    for _ in range(3):
        assert watch.cause(failing(error=TRACEBACK, left=2, kind=kind), NO_WORKERS) is None, "Serve tries again"
    cause = watch.cause(failing(error=TRACEBACK, left=1, kind=kind), NO_WORKERS)
    assert cause == "Ingress: AssertionError: needs at least one cacheable group"


def test_failures_with_different_reasons_or_of_different_parts_are_left_to_serve() -> None:
    watch = StartWatch()
    for left, error in ((3, "OSError: a"), (2, "OSError: b"), (1, "OSError: a")):
        assert watch.cause(failing(error=error, left=left), NO_WORKERS) is None
    assert watch.cause(failing(error="OSError: a", left=0, name="Replica"), NO_WORKERS) is None


def test_a_setting_that_cannot_work_is_not_tried_twice() -> None:
    error = "ray.exceptions.RayTaskError(SettingsError): kv.x: it cannot work; use y."
    cause = StartWatch().cause(failing(error=error, left=2), NO_WORKERS)
    assert cause == "Ingress: kv.x: it cannot work; use y."


def test_what_serve_has_given_up_ends_the_start() -> None:
    status = {**failing(error=TRACEBACK, left=0), "status": "DEPLOY_FAILED"}
    assert StartWatch().cause(status, NO_WORKERS) == "AssertionError: needs at least one cacheable group"


@pytest.mark.parametrize(
    "status", [{"phase": "ray"}, {"phase": "serve", "message": ""}, {"phase": "app", "message": ""}]
)
def test_a_start_whose_processes_end_at_birth_ends_after_a_minute_with_their_last_line(status: dict[str, Any]) -> None:
    now = 0.0
    watch = StartWatch(lambda: now)
    dead = ["ImportError: no module", "SystemError: no docstring"]
    now = 59.0
    assert watch.cause(status, lambda: dead) is None
    now = 61.0
    assert watch.cause(status, NO_WORKERS) is None, "a slow machine"
    assert watch.cause(failing(error="", left=3), lambda: dead) is None, "others have come up"
    assert (
        watch.cause(status, lambda: dead)
        == "Ray's processes end as soon as they are started: SystemError: no docstring"
    )


def test_the_last_line_of_a_worker_that_died_at_birth_is_found(plan: LaunchPlan, tmp_path: Path) -> None:
    server = Server(plan)
    assert server.dead_workers() == []
    server._ray_folder = tmp_path
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    assert server.dead_workers() == []
    said = "Some workers of the worker process({}) have not registered within the timeout. The process is {}.\n"
    dead = "dead, probably it crashed during start"
    raylet = said.format(7, dead) + said.format(8, "still alive, probably it's hanging during start")
    (logs / "raylet.out").write_text(raylet + said.format(9, dead))
    (logs / "worker-ab-ffffffff-7.err").write_text(":job_id:01\nTraceback\nTypeError: no docstring\n\n")
    assert server.dead_workers() == ["TypeError: no docstring", "process 9 ended without a word"]
    (logs / "raylet.err").write_text(f"Traceback\nImportError: no module\n[2026-11-27 00:08:21,264 E] {said}\n")
    assert server.dead_workers() == ["TypeError: no docstring", "ImportError: no module"]
    raylet_itself = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    assert dead.encode() in raylet_itself, "Ray's own words"
    assert b"Some workers of the worker process(" in raylet_itself


def test_off_a_terminal_a_step_that_goes_on_is_said_with_what_it_took_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("app.launch.progress.time.monotonic", lambda: now)
    written = io.StringIO()
    assert last_start(tmp_path) == {}
    note_start(tmp_path, {"loading the model": 12.3})
    with StartProgress(Console(file=written, width=200), last_start(tmp_path)) as progress:
        for now in (0.0, 10.0, 29.0, 31.0, 40.0, 62.0, 63.0):  # noqa: B007 (the clock reads it)
            progress.at("loading the model", "Replica 0/2")
        progress.done()
    assert written.getvalue().splitlines() == [
        "… loading the model (Replica 0/2): 31 s, last time 12 s",
        "… loading the model (Replica 0/2): 62 s, last time 12 s",
        "✓ loading the model 63.0 s",
    ]
    assert progress.took == {"loading the model": 63.0}
    note_start(tmp_path / "none", progress.took)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "b"}', "7"])
def test_a_broken_note_of_the_last_start_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "start.json").write_text(text)
    assert last_start(tmp_path) == {}


def test_a_server_that_was_ended_together_with_its_launcher_was_stopped_as_asked(plan: LaunchPlan) -> None:
    class Soon(Asked):
        looks = 0

        def wait_for_stop(self, timeout_s: float) -> bool:
            self.looks += 1
            return self.looks > 1

    server = Ending()
    server.exit_code = -15
    assert "ended by itself" not in play(plan, Soon(), server, 0)[1]
