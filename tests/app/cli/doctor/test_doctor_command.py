"""`crosskv doctor` in front of a server, of a settings file, and of neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml
from stand_in import StandIn, error, recorded
from typer.testing import CliRunner, Result

from app.cli.__main__ import app
from app.cli.doctor.gathered import setup_of, traffic_of
from app.cli.samples import Samples
from app.control.settings_shown import ModelShape, settings_shown
from configs import machine
from configs.model_folder import PROJECT_ROOT
from configs.settings import load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

Run = Callable[..., Result]
SHAPE = ModelShape(layers=6, kv_bytes_per_token=3072, longest_request_tokens=4096)


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    monkeypatch.setattr(machine, "cpu_dtype", lambda: "bfloat16")


def shown(**args: Any) -> dict[str, Any]:
    """What a server with these settings says of them."""
    answer = settings_shown(load_settings(args), SHAPE)
    answer["machine"]["cores"] = 4
    return answer


def with_plans(server: StandIn, **plans: int) -> None:
    """Let the server have counted these plans, and nothing that was reused."""
    lines = [f'crosskv_plans_total{{reason="{reason}"}} {count}' for reason, count in plans.items()]
    lines.append('crosskv_prompt_tokens_total{source="recomputed"} 10000')
    server.answers["/metrics"] = (200, "\n".join(lines) + "\n")


def config(folder: Path, **args: Any) -> str:
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"name": "crosskv", "args": args}]}))
    return str(file)


def test_what_a_real_server_said_is_read() -> None:
    metrics = Samples.parse((Path(__file__).parents[1] / "recorded" / "metrics.txt").read_text())
    seen = traffic_of(metrics, recorded("stats"), setup_of(shown()))
    assert seen.prompts == 38
    assert seen.tokens == {"device": 9728, "cpu": 6688, "redis": 1824, "recomputed": 5872}
    assert seen.hit_rate == pytest.approx(18240 / 24112)
    assert seen.ttft_s == pytest.approx(0.0343, abs=1e-3)
    assert seen.load_share == pytest.approx(0.083, abs=1e-3)
    assert {tier: of.budget_bytes for tier, of in seen.tiers.items()} == {"cpu": 1024**3, "redis": 1024**3}
    assert (seen.codecs["raw"].encoded, seen.codecs["raw"].decoded) == (29, 0)
    assert seen.credits["cpu"] == pytest.approx(0.94, abs=1e-2)
    assert (seen.chunk_tokens, seen.nodes, seen.device_pool_bytes) == (1276, 1, 256 * 32 * 3072)


def test_a_server_that_is_well_is_0(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/settings"] = (200, shown())
    result = crosskv("doctor")
    assert result.exit_code == 0, result.output
    assert "38 prompts, 76% of their tokens reused, first token after 0.03 s" in result.output
    assert "not enough seen yet (50 prompts are needed)" in result.output
    with_plans(server, hit=100)
    server.answers["/metrics"] = (200, server.answers["/metrics"][1].replace("recomputed", "device"))
    assert "nothing to change" in crosskv("doctor").output


def test_advice_is_1_and_says_what_and_why(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/settings"] = (200, shown(dtype="float32"))
    with_plans(server, evicted=60, cold=40)
    result = crosskv("doctor")
    assert result.exit_code == 1
    assert "warning slow-dtype" in result.output
    assert "set  dtype: auto" in result.output
    assert "more docs/guide/redis.md" in result.output
    assert "keep-kv-longer" in result.output
    said = json.loads(crosskv("doctor", "--json").stdout)
    assert [one["name"] for one in said["advice"]] == ["slow-dtype", "blend-chunks", "keep-kv-longer"]
    assert said["advice"][0]["severity"] == "warning"
    assert set(said["advice"][0]) == {"name", "severity", "evidence", "setting", "value", "why", "page", "also"}
    assert said["not_enough_seen"] == []
    assert said["seen"]["prompts"] == 100


def test_a_hostile_setting_is_shown_as_it_is(crosskv: Run, server: StandIn) -> None:
    said = shown()
    said["settings"]["blending"]["separators"] = ["\n", "[bold]\x1b[2J"]
    said["settings"]["tenants"] = {"\x1b[2J": {"fidelity": "exact"}}
    server.answers["/api/v1/settings"] = (200, said)
    result = crosskv("doctor")
    assert result.exit_code == 1
    assert "'\\n'" in result.output
    assert "\x1b" not in result.output


def of_tokens(*separators: list[int]) -> dict[str, Any]:
    return shown(blending={"separators": list(separators)})


def test_separators_of_token_ids_are_looked_for_in_what_the_model_makes_of_a_page(
    crosskv: Run, server: StandIn
) -> None:
    server.answers["/api/v1/settings"] = (200, of_tokens([7, 8]))
    server.answers["/tokenize"] = (200, {"tokens": [1, 7, 8, 2, 7, 8], "count": 6})
    result = crosskv("doctor")
    assert result.exit_code == 1
    assert "blending.separators has the tokens [7, 8]: 2 times" in result.output
    assert server.sent("/tokenize")["add_special_tokens"] is False
    server.answers["/tokenize"] = (200, {"tokens": [7, 1, 8]})
    assert crosskv("doctor").exit_code == 0


@pytest.mark.parametrize("said", [error("That is longer than the model's context.", 400), (200, {"tokens": "many"})])
def test_where_nobody_tells_a_pages_tokens_that_is_said(crosskv: Run, server: StandIn, said: Any) -> None:
    server.answers["/api/v1/settings"] = (200, of_tokens([7, 8]))
    server.answers["/tokenize"] = said
    result = crosskv("doctor")
    assert result.exit_code == 0
    assert "Separators that are token ids were not judged" in result.output


def test_a_settings_files_token_ids_are_read_by_its_models_tokenizer(tmp_path: Path) -> None:
    demo = tokenizers.Tokenizer.from_file(str(PROJECT_ROOT / "models" / "demo" / "tokenizer.json"))
    special, ordinary = [demo.get_added_tokens_decoder().popitem()[0]], demo.encode(".", add_special_tokens=False).ids
    for separator, code in ((special, 0), (ordinary, 1)):
        file = config(tmp_path, replicas=1, dtype="bfloat16", blending={"separators": [separator]})
        result = CliRunner().invoke(app, ["doctor", "--config", file, "--url", "http://127.0.0.1:9"])
        assert result.exit_code == code, result.output


def test_what_has_to_be_set_with_it_is_shown(crosskv: Run, server: StandIn) -> None:
    roles = {"prefill": 1}
    server.answers["/api/v1/settings"] = (200, shown(dtype="bfloat16", replicas=5, roles=roles))
    result = crosskv("doctor")
    assert "set  replicas: " in result.output
    assert "with roles.prefill: 0" in result.output
    (advice,) = json.loads(crosskv("doctor", "--json").stdout)["advice"]
    assert advice["also"] == {"roles.prefill": "0"}


@pytest.mark.parametrize("said", [{}, {"settings": [], "in_effect": None}, {"settings": {"kv": {"layerwise": 3}}}])
def test_settings_of_another_version_are_not_judged(crosskv: Run, server: StandIn, said: Any) -> None:
    server.answers["/api/v1/settings"] = (200, said)
    assert crosskv("doctor").exit_code == 0


def test_a_server_without_that_route_is_looked_at_all_the_same(crosskv: Run) -> None:
    result = crosskv("doctor")
    assert result.exit_code == 0
    assert "does not tell its settings" in result.output


def test_a_tenants_key_cannot_look(crosskv: Run, server: StandIn) -> None:
    server.answers["/api/v1/settings"] = error("Only an administrator may do this.", 403)
    result = crosskv("doctor")
    assert (result.exit_code, result.stdout) == (2, "")
    server.answers["/api/v1/settings"] = (200, shown())
    server.answers["/api/v1/kv/stats"] = (200, {"tenant": "acme", "tiers": {}})
    assert "administrator's key" in crosskv("doctor").stderr


def test_a_settings_file_is_looked_at_where_no_server_runs(tmp_path: Path) -> None:
    file = config(tmp_path, kv={"cpu_tier_bytes": "1MiB"}, engine={"threads": 64})
    result = CliRunner().invoke(app, ["doctor", "--config", file, "--url", "http://127.0.0.1:9", "--json"])
    assert result.exit_code == 1, result.output
    said = json.loads(result.stdout)
    assert [one["name"] for one in said["advice"]] == ["more-threads-than-cores", "cpu-tier-below-device-pool"]
    assert "Only the settings were looked at." in said["notes"][0]


def test_a_settings_file_comes_before_the_servers_own(crosskv: Run, server: StandIn, tmp_path: Path) -> None:
    server.answers["/api/v1/settings"] = (200, shown(dtype="float32"))
    assert crosskv("doctor", "--config", config(tmp_path, dtype="bfloat16", replicas=1)).exit_code == 0
    assert crosskv("doctor", "--config", config(tmp_path, dtype="float32", replicas=1)).exit_code == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("applications: [{args: {kv: {cpu_tier_bytes: lots}}}]", "kv.cpu_tier_bytes"),
        ("applications: [{args: [1]}]", "must hold settings by name"),
        ("applications: []", "exactly one application"),
        ("applications: [1]", "exactly one application"),
        ("]", "is not YAML"),
        ("", "holds no settings"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_settings_is_2(crosskv: Run, tmp_path: Path, text: str | None, expected: str) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    result = crosskv("doctor", "--config", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
