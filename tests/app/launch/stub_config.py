"""Serve configurations around the stub application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.launch.ports import free_port


def write_config(folder: Path, model: Path, builder: str = "build", port: int | None = None, **args: Any) -> Path:
    """A configuration file for the stub, on a free port unless one is given."""
    path = folder / "serve_config.yaml"
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port or free_port()},
        "applications": [
            {
                "name": "crosskv",
                "route_prefix": "/",
                "import_path": f"tests.app.launch.stub_app:{builder}",
                "args": {"model": str(model), "replicas": 1, "kv": {"cpu_tier_bytes": "64MiB"}, **args},
            }
        ],
    }
    path.write_text(yaml.safe_dump(config))
    return path
