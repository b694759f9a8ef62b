"""Other settings: no sharing and one replica; a Redis that cannot be used; LoRA adapters; models over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from first_minute import WithoutRedis
from keys import exposing
from lora_folders import write_adapter

from configs.model_folder import DEMO_MODEL, PROJECT_ROOT
from load_tests.faults.redis_process import PASSWORD
from load_tests.harness.models import write_hybrid
from load_tests.harness.patience import patience, until
from load_tests.harness.server import RunningServer, started

pytestmark = pytest.mark.server

PROMPT = "Anna lives in Oslo. " * 60
WITHOUT_SHARING = {
    "replicas": 1,
    "kv": {"enabled": False},
    "http": {"api_keys": {"alpha-key": {"tenant": "alpha", "admin": True}, "beta-key": "beta"}},
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
            timeout=patience(60),
        )

    answers = [ask("alpha-key"), ask("alpha-key", **{"X-CrossKV-Replica": "0"}), ask("beta-key")]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    usages: list[dict[str, Any]] = [answer.json()["usage"] for answer in answers]
    assert all(usage["kv_cache"]["recomputed"] == usage["prompt_tokens"] for usage in usages)
    assert ask("wrong-key").status_code == 401
    assert httpx.get(f"{private_server.url}/health", timeout=patience(60)).json()["status"] == "ok"


@pytest.mark.long("tests/deployments/engine/test_adapters.py")
@pytest.mark.long("tests/app/openai/test_lora_requests.py")
@pytest.mark.parametrize("process", ["thread", "process"])
def test_a_replica_takes_what_another_has_computed_with_the_same_adapter_and_no_other(
    process: str, tmp_path: Path
) -> None:
    adapters = {name: str(write_adapter(tmp_path / name, PROJECT_ROOT / DEMO_MODEL, seed))
                for seed, name in enumerate(("first", "second"))}  # fmt: skip
    models = ["demo", *adapters]
    settings = {
        "replicas": 2,
        "dtype": "float32",
        "engine": {"lora_adapters": adapters, "process": process},
        "kv": {"load_or_recompute": "load", "redis_url": None},
    }
    with started(tmp_path / "server", settings) as server:

        def ask(model: str, replica: int) -> tuple[str, int]:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0},
                headers={"X-CrossKV-Replica": str(replica)},
                timeout=patience(60),
            ).json()
            return answer["choices"][0]["text"], answer["usage"]["kv_cache"]["cpu"]

        def stored(model: str) -> int:
            query = {"text": PROMPT, "model": model}
            found = httpx.get(f"{server.url}/api/v1/kv/lookup", params=query, timeout=patience(60)).json()
            return int(found["tokens_by_tier"]["cpu"])

        cold = {model: ask(model, 0) for model in models}
        assert [loaded for _, loaded in cold.values()] == [0, 0, 0]
        assert len({text for text, _ in cold.values()}) == len(models)
        for model in models:
            until(lambda model=model: stored(model) >= 128, f"the prompt of {model} is in the CPU tier")
            text, loaded = ask(model, 1)
            assert (text, loaded >= 128) == (cold[model][0], True)


OVER_RANKS: dict[str, Any] = {
    "replicas": 2,
    "dtype": "float32",
    "engine": {"tensor_parallel_size": 2, "threads": 1},
    "kv": {"load_or_recompute": "load", "redis_url": None},
}
PROMPTS = [f"Document {number}. " + PROMPT for number in range(30)]


@pytest.mark.long("tests/deployments/engine/test_ranks.py")
@pytest.mark.parametrize("private_server", [OVER_RANKS], indirect=True)
def test_a_model_over_two_processes_shares_its_kv_and_is_replaced_when_one_of_them_dies(
    private_server: RunningServer,
) -> None:
    server = private_server

    def ask(prompt: str, replica: int) -> tuple[str, dict[str, Any]]:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0},
            headers={"X-CrossKV-Replica": str(replica)},
            timeout=patience(120),
        ).json()
        return answer["choices"][0]["text"], answer["usage"]["kv_cache"]

    def stored(prompt: str) -> int:
        found = httpx.get(f"{server.url}/api/v1/kv/lookup", params={"text": prompt}, timeout=patience(60)).json()
        return int(found["tokens_by_tier"]["cpu"])

    cold = {prompt: ask(prompt, 0) for prompt in PROMPTS}
    for prompt, (text, used) in cold.items():
        assert used["recomputed"] >= 128
        until(lambda prompt=prompt: stored(prompt) >= 128, "the prompt is in the CPU tier")
        again, used = ask(prompt, 1)
        assert (again, used["cpu"] >= 128) == (text, True)

    ranks = [one for one in server.launcher.children(recursive=True) if "VLLM::Worker" in one.name()]
    assert len(ranks) == 4
    ranks[0].kill()
    until(lambda: server.health()["status"] != "ok", "the death of a rank is its replica's")
    until(lambda: server.health()["status"] == "ok", "the replica is replaced", 240.0)
    assert not any(rank.is_running() for rank in ranks[:1])
    assert ask(PROMPTS[0], 0)[0] == ask(PROMPTS[0], 1)[0] == cold[PROMPTS[0]][0]


@pytest.mark.long("tests/deployments/engine/test_window_kv.py")
@pytest.mark.long("tests/deployments/engine/test_state_kv.py")
@pytest.mark.parametrize(("kind", "block"), [("windows", 32), ("states", 256)])
def test_a_replica_takes_windows_and_states_that_another_has_computed(kind: str, block: int, tmp_path: Path) -> None:
    write_hybrid(kind, tmp_path / "model")
    settings: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "served_model_name": "model",
        "replicas": 2,
        "dtype": "float32",
        "max_model_len": 2048,
        "engine": {"block_size_tokens": block},
        "kv": {"load_or_recompute": "load", "redis_url": None, "segment_tokens": max(256, block)},
    }
    with started(tmp_path / "server", settings) as server:

        def ask(text: str, replica: int) -> tuple[str, dict[str, Any]]:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"model": "model", "prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
                headers={"X-CrossKV-Replica": str(replica)},
                timeout=patience(120),
            ).json()
            return answer["choices"][0]["text"], answer["usage"]["kv_cache"]

        def landing(text: str) -> int:
            found = httpx.get(f"{server.url}/api/v1/kv/lookup", params={"text": text}, timeout=patience(60)).json()
            return int(found["landing_token"] if kind == "states" else found["tokens_by_tier"]["cpu"])

        assert "kv_sharing" not in str(server.health())
        prompts = [f"Document {number}. " + "Anna lives in Oslo. " * 130 for number in range(30)]
        cold = {text: ask(text, 0) for text in prompts}
        for text, (said, used) in cold.items():
            assert used["recomputed"] >= 1024
            until(lambda text=text: landing(text) >= 1024, "the prompt can be resumed in the CPU tier")
            again, used = ask(text, 1)
            assert (again, used["cpu"] >= 1024) == (said, True)
        if kind == "windows":  # random states forget how a text begins; what answers need of them is held in-process
            assert len({said for said, _ in cold.values()}) > 1


def test_a_server_whose_redis_cannot_be_used_says_so_and_serves_with_two_tiers(
    without_redis: WithoutRedis, server: RunningServer
) -> None:
    assert "password" in without_redis.redis_state
    first, second = (answer["usage"]["kv_cache"] for answer in without_redis.answers)
    assert (first["device"], first["redis"]) == (0, 0)
    assert second["device"] > 0
    assert "redis:" in without_redis.log
    assert PASSWORD not in without_redis.log + without_redis.redis_state
    assert exposing(server, PASSWORD) == []
