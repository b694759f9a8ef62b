"""What Prometheus and Grafana are started with: written into one folder, from `configs/prometheus` and
`configs/grafana`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.model_folder import PROJECT_ROOT

RULES = PROJECT_ROOT / "configs" / "prometheus"
DASHBOARDS = PROJECT_ROOT / "configs" / "grafana"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """Of the server that is watched, and of those that watch it; all on loopback."""

    server: int
    prometheus: int = 9090
    grafana: int = 3000


def write_prometheus(folder: Path, ports: Ports, metrics_key: str | None) -> Path:
    """The configuration's path. A key goes into a file that its owner alone can read."""
    config: dict[str, Any] = yaml.safe_load((RULES / "prometheus.yaml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [f"{LOOPBACK}:{ports.server}"]}]
    if metrics_key is not None:
        key_file = folder / "metrics_key"
        key_file.unlink(missing_ok=True)
        with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(metrics_key)
        scrape["authorization"] = {"credentials_file": str(key_file)}
    return _written(folder / "prometheus.yaml", config)


def write_grafana(folder: Path, ports: Ports) -> dict[str, str]:
    """Its environment: Prometheus as its data source, the dashboard as its home, and all users of this machine as
    viewers."""
    provisioning = folder / "provisioning"
    source = {"name": "Prometheus", "type": "prometheus", "url": f"http://{LOOPBACK}:{ports.prometheus}"}
    _written(
        provisioning / "datasources" / "prometheus.yaml",
        {"apiVersion": 1, "datasources": [{**source, "access": "proxy", "isDefault": True}]},
    )
    provider = {"name": "crosskv", "type": "file", "options": {"path": str(DASHBOARDS)}}
    _written(provisioning / "dashboards" / "crosskv.yaml", {"apiVersion": 1, "providers": [provider]})
    return {
        "GF_SERVER_HTTP_ADDR": LOOPBACK,
        "GF_SERVER_HTTP_PORT": str(ports.grafana),
        "GF_PATHS_DATA": str(folder / "grafana"),
        "GF_PATHS_LOGS": str(folder / "grafana" / "log"),
        "GF_PATHS_PROVISIONING": str(provisioning),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(DASHBOARDS / "crosskv.json"),
    }


def _written(path: Path, content: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    return path
