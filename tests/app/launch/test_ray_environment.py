"""What Ray and Serve are told when they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.launch.cluster import ray_environment, write_token
from configs.settings import load_settings


def test_serve_gives_its_http_proxy_a_minute_to_start(model_folder: Path, tmp_path: Path) -> None:
    environment = ray_environment(load_settings({"model": str(model_folder)}), write_token(tmp_path))
    code = "from ray.serve._private import proxy_state; print(proxy_state.PROXY_READY_CHECK_TIMEOUT_S)"
    printed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert float(printed.stdout.split()[-1]) == 60
