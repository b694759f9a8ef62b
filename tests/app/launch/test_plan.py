"""What the launcher makes of serve_config.yaml, a preset and the overrides."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from app.launch import run_folder
from app.launch.plan import LaunchPlan, Overrides, make_plan, merge
from app.launch.ports import free_port
from app.launch.readiness import Readiness
from configs.settings import SettingsError, load_settings
from tests.app.launch.stub_config import write_config

pytestmark = pytest.mark.usefixtures("each_processor")


def test_without_overrides_the_file_decides(tmp_path: Path, model_folder: Path) -> None:
    plan = make_plan(write_config(tmp_path, model_folder, replicas=3), Overrides())
    assert plan.settings.replicas == 3
    assert plan.app_name == "crosskv"
    assert plan.address == f"http://127.0.0.1:{plan.port}"


@pytest.mark.parametrize(("host", "asked"), [("::1", "[::1]"), ("::", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_a_server_is_asked_where_it_listens(host: str, asked: str) -> None:
    plan = LaunchPlan({}, load_settings({}), "crosskv", host, 8000)
    assert plan.address == f"http://{asked}:8000"
    Readiness(plan).close()


def test_a_port_is_not_drawn_from_the_numbers_that_an_engine_seeds() -> None:
    """Else two processes with an engine would choose the same ones."""
    before = random.getstate()
    free_port()
    assert random.getstate() == before


def test_each_override_replaces_the_files_value(tmp_path: Path, model_folder: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, model_folder, engine={"threads": 2})
    overrides = Overrides(port=port, model="Qwen/Qwen3-8B", replicas=3, device_blocks=65, max_model_len=2048)
    plan = make_plan(config, overrides)
    args = plan.serve_config["applications"][0]["args"]
    assert plan.serve_config["http_options"]["port"] == plan.port == port
    assert (args["model"], args["replicas"], args["max_model_len"]) == ("Qwen/Qwen3-8B", 3, 2048)
    assert args["engine"] == {"threads": 2, "device_blocks": 65}
    assert plan.settings.engine.device_blocks == 65


def test_an_override_that_is_no_number_is_one_sentence() -> None:
    assert Overrides.parse("m", port="8001", replicas=None) == Overrides(port=8001, model="m")
    with pytest.raises(SettingsError, match=r"^MAX_MODEL_LEN: '4k' is not a whole number; write it in digits\.$"):
        Overrides.parse(None, max_model_len="4k")


def test_a_presets_name_brings_its_settings_and_other_overrides_win(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder, http={"drop_media": True})
    plan = make_plan(config, Overrides(model="Qwen2.5-0.5B-Instruct", max_model_len=1024))
    assert plan.settings.model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert plan.settings.max_model_len == 1024
    assert plan.settings.engine.tool_call_parser == "hermes"
    assert plan.settings.http.drop_media


def test_a_scenario_from_the_command_line_leaves_what_the_file_says(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder, kv={"save_answers": "auto"})
    plan = make_plan(config, Overrides.parse(None, "short"))
    assert plan.serve_config["applications"][0]["args"]["scenario"] == plan.settings.scenario == "short"
    assert (plan.settings.kv.save_answers, plan.settings.kv.redis_codec) == ("auto", "raw")
    with pytest.raises(SettingsError, match=r"^scenario: there is no scenario 'shrt'; use one of chat, "):
        make_plan(config, Overrides.parse(None, "shrt"))


def test_sections_merge_and_values_do_not() -> None:
    below = {"a": {"x": 1, "y": 2}, "b": [1]}
    assert merge(below, {"a": {"y": 3}, "b": [2]}) == {"a": {"x": 1, "y": 3}, "b": [2]}
    assert below == {"a": {"x": 1, "y": 2}, "b": [1]}


def test_a_port_in_use_is_refused_with_another_to_try(tmp_path: Path, model_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port} .*PORT="):
            make_plan(write_config(tmp_path, model_folder, port=port), Overrides())


def test_the_port_of_the_running_server_is_free_for_its_restart(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder)
    running = make_plan(config, Overrides())
    with socket.socket() as own, socket.socket() as anothers:
        own.bind(("127.0.0.1", running.port))
        own.listen()
        anothers.bind(("127.0.0.1", 0))
        anothers.listen()
        assert make_plan(config, Overrides(), running) == running
        with pytest.raises(SettingsError, match="PORT="):
            make_plan(config, Overrides(port=anothers.getsockname()[1]), running)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no settings"),
        ("a: [", "line 1"),
        ("applications: []", "exactly one application"),
        ("applications: [{import_path: a, args: 3}]", "args"),
        ("applications: [{import_path: a}]\nhttp_options: {port: 99999}", "http_options.port"),
        ("applications: [{import_path: a, args: {replica: 1}}]", "replicas"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=says) as error:
        make_plan(path, Overrides())
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(b"applications: [\xff]")
    with pytest.raises(SettingsError, match="is not text in UTF-8"):
        make_plan(path, Overrides())


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        make_plan(tmp_path / "none.yaml", Overrides())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:1/0", "no Redis can be reached"),
        ("unix:///no/such/socket", "no Redis can be reached"),
    ],
)
def test_a_required_redis_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, model_folder: Path, url: str, says: str
) -> None:
    config = write_config(tmp_path, model_folder, kv={"redis_url": url, "redis_required": True})
    with pytest.raises(SettingsError, match=r"^kv\.redis_required: ") as refused:
        make_plan(config, Overrides())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_redis_that_is_not_required_is_asked_and_started_without(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder, kv={"redis_url": "redis://127.0.0.1:1/0"})
    (warning,) = make_plan(config, Overrides()).warnings
    assert warning.startswith("kv.redis_url: no Redis can be reached at redis://127.0.0.1:1:")
    assert "starts without it" in warning


@pytest.mark.parametrize(("threads", "warned"), [(1, False), (2, False), (3, True)])
def test_threads_that_would_wait_for_each_other_are_told(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int, warned: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    config = write_config(tmp_path, model_folder, replicas=2, engine={"threads": threads})
    assert [said.startswith("engine.threads: 2 replicas") for said in make_plan(config, Overrides()).warnings] == (
        [True] if warned else []
    )


@pytest.mark.parametrize("place", ["/proc/crosskv", "/dev/null/crosskv"])
def test_a_run_folder_that_cannot_be_written_is_refused_with_the_variable_that_moves_it(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(run_folder, "RUN_FOLDER", Path(place))
    with pytest.raises(SettingsError, match=rf"^{place}/.* cannot be written there .*set CROSSKV_FOLDER") as refused:
        make_plan(write_config(tmp_path, model_folder), Overrides())
    assert "\n" not in str(refused.value)


def test_looking_whether_the_run_folder_can_be_written_leaves_nothing(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "RUN_FOLDER", tmp_path / "own" / "runs")
    plan = make_plan(write_config(tmp_path, model_folder), Overrides())
    assert not (tmp_path / "own").exists()
    plan.run_folder.mkdir(parents=True)
    make_plan(write_config(tmp_path, model_folder), Overrides())
    assert list(plan.run_folder.iterdir()) == []


def test_an_open_server_beyond_loopback_is_refused_before_anything_starts(tmp_path: Path, model_folder: Path) -> None:
    path = write_config(tmp_path, model_folder)
    path.write_text(path.read_text().replace("host: 127.0.0.1", "host: 0.0.0.0"))
    with pytest.raises(SettingsError, match=r"^http\.api_keys: .*0\.0\.0\.0"):
        make_plan(path, Overrides())
    path.write_text(path.read_text().replace("replicas: 1", "replicas: 1\n    http: {api_keys: {key: tenant}}"))
    assert make_plan(path, Overrides()).host == "0.0.0.0"
