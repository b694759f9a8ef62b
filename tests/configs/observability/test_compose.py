"""The compose file that watches a server mounts what there is, listens on loopback, and keeps the key out of sight."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.model_folder import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "configs" / "observe"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def mounts(service: str) -> list[tuple[str, str]]:
    """Sources of this project, and where the container sees each."""
    pairs = [str(volume).split(":")[:2] for volume in SERVICES[service]["volumes"]]
    return [(source, target) for source, target in pairs if source.startswith(".")]


def prometheus_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"].replace("${PORT:-8000}", "8000"))
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_is_there_and_the_images_version_is_pinned(service: str) -> None:
    assert all((FOLDER / source).exists() for source, _ in mounts(service))
    assert SERVICES[service]["image"].rpartition(":")[2].lstrip("v").replace(".", "").isdigit()
    named = {str(volume).split(":")[0] for volume in SERVICES[service]["volumes"]}
    assert {name for name in named if not name.startswith(".")} <= COMPOSE["volumes"].keys()


def test_nothing_listens_beyond_loopback() -> None:
    assert "--web.listen-address=127.0.0.1:9090" in SERVICES["prometheus"]["command"]
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert not any("ports" in service for service in SERVICES.values())


def test_prometheus_is_configured_as_the_page_for_ones_own_says_and_has_the_key_in_a_file() -> None:
    own = yaml.safe_load((PROJECT_ROOT / "configs" / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    config = prometheus_config()
    authorization = config["scrape_configs"][0].pop("authorization")
    assert config == own
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert authorization == {"credentials_file": f"/run/secrets/{secret}"}
    assert COMPOSE["secrets"][secret] == {"environment": "CROSSKV_METRICS_KEY"}


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = yaml.safe_load((FOLDER / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    (provider,) = yaml.safe_load((FOLDER / "dashboards" / "crosskv.yaml").read_text(encoding="utf-8"))["providers"]
    folders = {target: FOLDER / source for source, target in mounts("grafana")}
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert json.loads((folders[str(home.parent)] / home.name).read_text(encoding="utf-8"))["uid"] == "crosskv"


@pytest.mark.parametrize("key", [None, "a-key"])
def test_make_observe_gives_compose_a_port_and_a_key_that_may_be_empty(tmp_path: Path, key: str | None) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" "$PORT" "${CROSSKV_METRICS_KEY-not set}."\n', encoding="utf-8")
    docker.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("CROSSKV_METRICS_KEY", "PORT")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if key is None else {"CROSSKV_METRICS_KEY": key})
    command = ["make", "--no-print-directory", "observe", "PORT=8123"]
    said = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"compose -f configs/observe/compose.yaml up 8123 {key or ''}.\n"
