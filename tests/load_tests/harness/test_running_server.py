"""How a running server is asked for its metrics."""

from __future__ import annotations

import dataclasses
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from load_tests.harness import patience
from load_tests.harness.server import MOST_SCRAPES, RunningServer, ServerError

METRICS = """\
# HELP crosskv_tier_segments How many.
# TYPE crosskv_tier_segments gauge
crosskv_tier_segments{tier="cpu",node="a"} 3.0
crosskv_tier_segments{tier="cpu",node="b"} 4.0
crosskv_tier_segments{tier="redis"} 5.0
# TYPE crosskv_tier_segments_lost counter
crosskv_tier_segments_lost_total{tier="cpu"} 70.0
# TYPE crosskv_degradations counter
crosskv_degradations_total{kind="fetch_late"} 2.0
crosskv_degradations_total{kind="redis_late"} 1.0
crosskv_degradations_total{kind="manager_slow"} 9.0
"""


@pytest.fixture
def server() -> RunningServer:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=METRICS)))
    return RunningServer("http://nowhere", 1, Path(), psutil.Process(os.getpid()), Path(), client)


def test_a_metric_is_the_sum_of_what_has_its_very_name_and_the_labels(server: RunningServer) -> None:
    assert server.metric("crosskv_tier_segments", tier="cpu") == server.segments("cpu") == 7
    assert server.metric("crosskv_tier_segments") == 12
    assert server.metric("crosskv_tier_segments_lost_total") == 70
    assert server.late_loads() == 3


@pytest.mark.parametrize(("name", "labels"), [("crosskv_tier", {}), ("crosskv_tier_segments", {"tier": "device"})])
def test_what_is_not_there_is_no_zero(server: RunningServer, name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ServerError, match=name):
        server.metric(name, **labels)


def test_a_part_that_health_does_not_name_yet_is_waited_for(server: RunningServer) -> None:
    parts: dict[str, dict[str, str]] = {}
    told = httpx.MockTransport(lambda request: httpx.Response(200, json={"status": "degraded", "parts": parts}))
    server = dataclasses.replace(server, http=httpx.Client(transport=told))
    looks = []

    def away() -> bool:
        looks.append(len(parts))
        if len(looks) == 3:
            parts["redis"] = {"state": "away"}
        return bool(server.part("redis")["state"] == "away")

    server.wait_until(away, "it is named")
    assert looks == [0, 0, 0]


def test_what_is_waited_for_is_asked_for_ever_more_seldom(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "slowness", lambda: 1.0)
    now, asked = [0.0], []

    def wait(seconds: float) -> None:
        now[0] += seconds

    server = dataclasses.replace(server, clock=SimpleNamespace(monotonic=lambda: now[0], sleep=wait))

    def comes_late() -> bool:
        asked.append(now[0])
        if len(asked) == 2:
            raise httpx.ConnectError("not yet")
        return now[0] > 25

    server.wait_until(comes_late, "it", deadline_s=30.0)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.2
    assert pauses[-1] == pauses[-2] == 1.0
    with pytest.raises(ServerError, match=r"not within 30 s: never"):
        server.wait_until(lambda: False, "never", deadline_s=30.0)


def test_a_server_is_idle_when_two_scrapes_say_so(server: RunningServer) -> None:
    """The first one has asked the manager before a save was offered, and the replica when it held no block any more."""
    scraped, left = answering(server, idle(), idle(reservations=1), idle(), idle())
    scraped.wait_until_idle()
    assert left == ["not asked for"]


def answering(server: RunningServer, *pages: str) -> tuple[RunningServer, list[str]]:
    """The server, answering with these pages, and those that are left."""
    left = [*pages, "not asked for"]
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=left.pop(0))))
    return dataclasses.replace(server, http=client), left


def test_a_part_that_was_late_for_a_scrape_is_asked_again(server: RunningServer) -> None:
    whole = "crosskv_metrics_sources_missing_total 1.0\ncrosskv_device_blocks 5\ncrosskv_index_leases 2\n"
    part = whole.replace("crosskv_index_leases 2\n", "")
    scraped, left = answering(server, part, whole, whole)
    assert scraped.metric("crosskv_index_leases") == 2
    assert scraped.metric("crosskv_index_leases") == 2
    assert left == ["not asked for"]


def test_a_part_that_is_gone_is_not_asked_for_ever(server: RunningServer) -> None:
    pages = [f"crosskv_metrics_sources_missing_total {number}.0\ncrosskv_device_blocks 5\n" for number in range(1, 10)]
    scraped, left = answering(server, *pages)
    with pytest.raises(ServerError, match="crosskv_index_leases"):
        scraped.metric("crosskv_index_leases")
    assert len(left) == 10 - MOST_SCRAPES


def test_a_server_of_which_a_part_gave_no_metrics_is_not_known_to_be_idle(server: RunningServer) -> None:
    scraped, left = answering(server, idle().replace("crosskv_index_leases 0\n", ""), idle(), idle())
    scraped.wait_until_idle()
    assert left == ["not asked for"]


def idle(reservations: int = 0) -> str:
    figures = {"index_leases": 0, "index_reservations": reservations, "index_demotions": 0}
    figures |= {"device_free_blocks": 99, "device_blocks": 100}
    return "".join(f"crosskv_{name} {value}\n" for name, value in figures.items()) + "vllm:num_requests_running 0\n"


def test_all_samples_are_there_where_no_name_is_given(server: RunningServer) -> None:
    assert len(server.metrics()) == 7
    assert server.metrics("crosskv_degradations", "crosskv_tier_segments_lost") == server.metrics()[3:]
