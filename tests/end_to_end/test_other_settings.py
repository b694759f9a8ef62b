"""Other settings: no sharing and one replica; a Redis that cannot be used."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from first_minute import WithoutRedis

from load_tests.faults.redis_process import PASSWORD
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

PROMPT = "Anna lives in Oslo. " * 60
WITHOUT_SHARING = {
    "replicas": 1,
    "kv": {"enabled": False},
    "http": {"debug_headers": True, "api_keys": {"alpha-key": "alpha", "beta-key": "beta"}},
}


@pytest.mark.long(
    "tests/deployments/engine/test_supported_models.py::test_without_sharing_an_engine_recomputes_everything"
)
@pytest.mark.long("tests/deployments/replica/test_serve_options.py::test_both_deployments_have_them")
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


def test_a_server_whose_redis_cannot_be_used_says_so_and_serves_with_two_tiers(
    without_redis: WithoutRedis, server: RunningServer
) -> None:
    assert "password" in without_redis.redis_state
    first, second = (answer["usage"]["kv_cache"] for answer in without_redis.answers)
    assert (first["device"], first["redis"]) == (0, 0)
    assert second["device"] > 0
    assert "redis:" in without_redis.log
    assert PASSWORD not in without_redis.log + without_redis.redis_state
    assert server.exposing(PASSWORD) == []
