"""The manifest for KubeRay fits its schema, what it serves is a valid configuration, and answers end before pods do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError, load_settings

MANIFEST = PROJECT_ROOT / "configs" / "kuberay" / "rayservice.yaml"
SCHEMA = Path(__file__).with_name("rayservice_schema.json")


def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def served() -> dict[str, Any]:
    return yaml.safe_load(manifest()["spec"]["serveConfigV2"])


def pods() -> Iterator[dict[str, Any]]:
    cluster = manifest()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in pod["containers"]]


def errors(document: dict[str, Any]) -> list[str]:
    checker = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    return [error.message for error in checker.iter_errors(document)]


def test_the_manifest_fits_kuberays_schema() -> None:
    assert errors(manifest()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rayStartParams:", "rayStartParam:"),
        ('num-cpus: "0"', "num-cpus: 0"),
        ("mode: token", "mode: tokens"),
        ("- groupName: engines", "- groupNames: engines"),
        ("preStop:", "beforeStop:"),
        ("initialDelaySeconds: 30", "initialDelaySeconds: soon"),
    ],
)
def test_the_schema_finds_what_kubernetes_would_refuse(old: str, new: str) -> None:
    text = MANIFEST.read_text()
    assert old in text
    assert errors(yaml.safe_load(text.replace(old, new)))


def test_what_it_serves_is_a_valid_configuration() -> None:
    config = served()
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "app.builder:build"
    settings = load_settings(application["args"])
    assert settings.max_replicas <= manifest()["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] * 2
    assert settings.kv.redis_url != "embedded", "which is of one node"


def test_a_wrong_setting_in_it_would_be_found() -> None:
    (application,) = served()["applications"]
    with pytest.raises(SettingsError, match="replica"):
        load_settings({**application["args"], "replica": 3})


def test_whoever_reaches_it_needs_a_key_and_no_secret_stands_in_it() -> None:
    assert served()["http_options"]["host"] == "0.0.0.0"
    assert manifest()["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"
    for container in containers():
        environment = {entry["name"]: entry for entry in container["env"]}
        for name in ("CROSSKV_SECRET", "CROSSKV_API_KEYS"):
            assert "value" not in environment[name]
            assert environment[name]["valueFrom"]["secretKeyRef"]["name"]
    assert "api_keys" not in served()["applications"][0]["args"]["http"]


def test_every_container_has_probes_at_a_port_that_something_listens_on() -> None:
    port = served()["http_options"]["port"]
    ray_agent = 52365
    for container in containers():
        assert container["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": ray_agent}
        assert container["readinessProbe"]["httpGet"]["port"] in (port, ray_agent)
    *_, worker = containers()
    assert worker["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": port}


def test_a_pod_outlives_its_answers() -> None:
    drain_s = load_settings(served()["applications"][0]["args"]).http.drain_s
    assert manifest()["spec"]["rayClusterDeletionDelaySeconds"] > drain_s
    for pod in pods():
        assert pod["terminationGracePeriodSeconds"] > drain_s
    _, worker = pods()
    (container,) = worker["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert drain_s < int(seconds) < worker["terminationGracePeriodSeconds"]


def test_nodes_hold_the_cpu_tier_and_the_ray_that_is_pinned() -> None:
    cluster = manifest()["spec"]["rayClusterConfig"]
    pinned = re.search(r"^ray==(\S+)", (PROJECT_ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert pinned
    assert cluster["rayVersion"] == pinned[1]
    tier_bytes = int(load_settings(served()["applications"][0]["args"]).kv.cpu_tier_bytes)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert int(group["rayStartParams"]["object-store-memory"]) > tier_bytes
