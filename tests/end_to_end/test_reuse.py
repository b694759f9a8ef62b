"""What a user sees: `make demo` passes, the official client works, tiers and tenants are what the API says."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
from openai import OpenAI

from configs.model_folder import PROJECT_ROOT
from load_tests.running_server import RunningServer

pytestmark = pytest.mark.server

DOCUMENT = " ".join(f"Anna lives in Paris. Ben is a baker. Note {number}." for number in range(40))


def ask(server: RunningServer, pin: int | None, salt: str, stream: bool = False) -> dict[str, int]:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    options: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Where does Anna live?"}],
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"cache_salt": salt, "ignore_eos": True},
        "extra_headers": {} if pin is None else {"X-CrossKV-Replica": str(pin)},
    }
    if stream:
        chunks = list(
            client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        )
        usage = chunks[-1].usage
    else:
        usage = client.chat.completions.create(**options).usage  # type: ignore[call-overload]
    kv = usage.kv_cache
    assert kv["device"] + kv["cpu"] + kv["redis"] + kv["recomputed"] == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - kv["recomputed"]
    return dict(kv)


def saved_blocks(server: RunningServer) -> float:
    return server.metric("crosskv_tier_segments", tier="cpu")


@pytest.mark.parametrize("stream", [False, True])
def test_what_one_replica_computed_the_other_loads(server: RunningServer, stream: bool) -> None:
    salt = f"cross-{stream}"
    before = saved_blocks(server)

    cold = ask(server, 0, salt, stream)
    server.wait_until(lambda: saved_blocks(server) > before, "the prompt is in the CPU tier")
    server.wait_until_idle()
    warm = ask(server, 0, salt, stream)
    crossed = ask(server, 1, salt, stream)

    assert (cold["device"], cold["cpu"], cold["replica"]) == (0, 0, "0")
    assert warm["device"] > 256
    assert (crossed["device"], crossed["cpu"], crossed["replica"]) == (0, warm["device"], "1")


def test_clearing_the_device_leaves_the_cpu_tier_and_clearing_both_leaves_nothing(server: RunningServer) -> None:
    ask(server, 0, "clear")
    server.wait_until_idle()

    server.clear("device")
    loaded = ask(server, 0, "clear")
    server.wait_until_idle()
    server.clear("device", "cpu")
    recomputed = ask(server, 0, "clear")

    assert loaded["device"] == 0
    assert loaded["cpu"] > 256
    assert recomputed["device"] == recomputed["cpu"] == 0


def test_a_different_cache_salt_sees_nothing(server: RunningServer) -> None:
    ask(server, 0, "mine")
    server.wait_until_idle()

    others = ask(server, 0, "yours")

    assert others["device"] == others["cpu"] == 0


def test_unpinned_requests_follow_their_prefix(server: RunningServer) -> None:
    server.clear("device", "cpu")
    home = ask(server, 1, "affinity")["replica"]
    server.wait_until_idle()

    replicas = {ask(server, None, "affinity")["replica"] for _ in range(4)}

    assert replicas == {home}


def test_stats_add_up(server: RunningServer) -> None:
    ask(server, 0, "stats")
    server.wait_until_idle()

    stats = httpx.get(f"{server.url}/api/v1/kv/stats").json()

    (manager,) = [location for location in stats["locations"] if location["tier"] == "cpu"]
    (tier,) = stats["cpu_tiers"].values()
    assert manager["segments"] == tier["segments"] > 0
    assert manager["bytes"] == tier["used_bytes"]
    assert manager["reserved_bytes"] == 0


@pytest.mark.timeout(300)
def test_the_demo_passes(server: RunningServer) -> None:
    command = [sys.executable, "-m", "app.demo", "--port", str(server.port), "--json", "-"]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)
