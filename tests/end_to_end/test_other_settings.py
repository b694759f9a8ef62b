"""Servers with settings of their own: no sharing, one replica, tenants, a Redis that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.faults.redis_process import RedisProcess
from load_tests.harness.running_server import RunningServer, started

pytestmark = pytest.mark.server

PROMPT = "Anna lives in Oslo. " * 60
WITHOUT_SHARING = {
    "replicas": 1,
    "kv": {"enabled": False},
    "http": {"debug_headers": True, "api_keys": {"alpha-key": "alpha", "beta-key": "beta"}},
}


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


def test_a_server_whose_redis_cannot_be_used_says_so_and_serves_with_two_tiers(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "their-redis")
    url = f"redis://:wrong@127.0.0.1:{redis.port}/0"
    try:
        with started(tmp_path, {"replicas": 1, "kv": {"redis_url": url}}, wanted_status="degraded") as server:
            server.wait_until(lambda: "password" in server.health()["parts"]["redis"]["state"], "the reason is named")
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}
            for _ in range(2):
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["kv_cache"]["device"] > 0
            server.wait_until(lambda: "redis:" in server.log.read_text(), "the launcher has told it too")
            assert "wrong" not in server.log.read_text().replace("wrong password", "")
    finally:
        redis.stop()
