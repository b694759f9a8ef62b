"""Servers with settings of their own: no sharing, one replica, tenants."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from load_tests.running_server import RunningServer

pytestmark = pytest.mark.server

PROMPT = "Anna lives in Oslo. " * 60
WITHOUT_SHARING = {
    "replicas": 1,
    "kv": {"enabled": False},
    "http": {"debug_headers": True, "api_keys": {"alpha-key": "alpha", "beta-key": "beta"}},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("private_server", [WITHOUT_SHARING], indirect=True)
def test_a_server_without_sharing_serves_and_recomputes_everything(private_server: RunningServer) -> None:
    def ask(key: str, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{private_server.url}/v1/completions",
            json={"model": "demo", "prompt": PROMPT, "max_tokens": 4},
            headers={"Authorization": f"Bearer {key}", **headers},
            timeout=60,
        )

    answers = [ask("alpha-key"), ask("alpha-key", **{"X-CrossKV-Replica": "0"}), ask("beta-key")]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    usages: list[dict[str, Any]] = [answer.json()["usage"] for answer in answers]
    assert all(usage["kv_cache"]["recomputed"] == usage["prompt_tokens"] for usage in usages)
    assert ask("wrong-key").status_code == 401
    assert httpx.get(f"{private_server.url}/health").json()["status"] == "ok"
