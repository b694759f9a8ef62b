"""The Redis tier with a real Redis under a manager that records what it is told; one test in a real Ray: a crash.

That a manager finds the tier, and the tier a new manager, over Ray: `together/test_three_tiers.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from redis_deployment import Deployment, Manager
from redis_fixture import (
    FINGERPRINT,
    MIB,
    OTHER_FINGERPRINT,
    PATIENCE_S,
    RedisForTests,
    chain,
    endpoint,
    fill,
    redis_name,
    sealed,
    until,
)

from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.redis_tier import access as redis_access
from deployments.redis_tier import actor as redis_tier
from deployments.redis_tier import entries as redis_entries
from deployments.redis_tier import server as redis_server
from deployments.redis_tier.access import RedisAccess
from deployments.redis_tier.actor import read_index
from deployments.redis_tier.config import RedisTierConfig
from deployments.redis_tier.entries import Neighbours, owner_key
from deployments.segment_store.endpoint import open_store
from deployments.segment_store.redis_connection import RedisLoadingError, RedisUnavailableError, connect
from deployments.segment_store.redis_profiles import FIELD
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _empty(external: RedisForTests) -> None:
    external.empty()


def keys_but_the_claim(external: RedisForTests) -> set[bytes]:
    """Every key of this Redis but the claim of namespace "tests", which its tier puts there at any time."""
    return set(external.client.keys()) - {owner_key("tests", FINGERPRINT)}


def test_nothing_is_registered_before_the_models_fingerprint_is_known(deployments: Any, tmp_path: Path) -> None:
    deployment = deployments(folder=str(tmp_path), fingerprint=None)
    until(lambda: "waits for the first replica" in deployment.report()["state"], "Redis is ready")
    assert deployment.report()["told"] == []
    deployment.ask("set_fingerprint", FINGERPRINT)
    report = deployment.until_ok()
    assert report["told"] == ["registered", "indexed"]
    assert report["budget"] == 64 * MIB
    assert report["endpoint"].fingerprint == FINGERPRINT
    stats = deployment.ask_tier("stats")
    assert stats["state"] == "ok"
    assert stats["maxmemory_bytes"] > 64 * MIB
    assert stats["version"].startswith(("Redis", "Valkey"))


def test_after_a_restart_everything_is_found_again_parents_first_and_the_rest_is_deleted(
    deployments: Any, tmp_path: Path, in_ray: type[Deployment]
) -> None:
    whole, broken = chain(1, 300), chain(2, 3)
    with_data = RedisForTests(tmp_path)
    fill(with_data.client, whole)
    fill(with_data.client, broken[1:])  # orphans: the first segment is not there
    fill(with_data.client, chain(3, 2), fingerprint=OTHER_FINGERPRINT)
    with_data.client.set(redis_name(b"u" * 32), b"unusable")
    with_data.stop()

    deployment = deployments(in_ray, folder=str(tmp_path))
    report = deployment.until_ok()
    assert list(report["kept"].values()) == whole
    assert deployment.ask_tier("stats")["unusable"] == 1
    client = connect(report["endpoint"].url, 5.0)
    assert client.dbsize() == 302, "orphans and unusable ones are gone, another model's are kept"

    ray.kill(deployment.tier, no_restart=False)  # a crash: the server ends with it, another is started
    report = deployment.until_ok(after=1)
    assert list(report["kept"].values()) == whole
    store = open_store(report["endpoint"])
    assert store.get(whole[299].key) == sealed(whole[299]).tobytes()


def test_swapping_models_keeps_their_kv(deployments: Any, tmp_path: Path) -> None:
    mine, others = chain(31, 2), chain(32, 3)
    with_data = RedisForTests(tmp_path)
    fill(with_data.client, mine)
    fill(with_data.client, others, fingerprint=OTHER_FINGERPRINT)
    with_data.client.set("anything", "else")
    profile = endpoint("").profile_prefix + b"00" * 16
    with_data.client.hset(profile, FIELD, "a codec profile")
    with_data.stop()

    deployment = deployments(folder=str(tmp_path))
    assert set(deployment.until_ok()["kept"]) == {span.key for span in mine}
    assert deployment.ask_tier("stats")["neighbours"] == 3
    client = connect(deployment.report()["endpoint"].url, 5.0)
    assert client.exists(profile)
    assert not client.exists("anything")
    client.close()
    deployment.ask_tier("close")

    swapped = deployments(folder=str(tmp_path), fingerprint=OTHER_FINGERPRINT)
    assert set(swapped.until_ok()["kept"]) == {span.key for span in others}


def test_of_other_models_what_was_not_used_for_longest_leaves_when_room_is_needed(
    external: RedisForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_entries, "BATCH", 2)
    mine, others = chain(33, 2), chain(34, 8)
    fill(external.client, mine)
    fill(external.client, others, fingerprint=OTHER_FINGERPRINT)
    names = [redis_name(span.key, fingerprint=OTHER_FINGERPRINT) for span in others]
    for age, name in enumerate(names):
        external.client.pexpire(name, 10_000_000 - 1000 * age)  # the last was not used for longest
    neighbours = Neighbours(external.client, endpoint("").prefix, 100 * MIB)
    assert neighbours.survey() == 0
    assert (neighbours.segments, neighbours.make_room(94 * MIB)) == (8, 0), "there is room"

    used = iter([97 * MIB, 90 * MIB, 84 * MIB])
    monkeypatch.setattr(neighbours, "_used_bytes", lambda: next(used))
    assert neighbours.make_room(97 * MIB) == 4
    assert [bool(external.client.exists(name)) for name in names] == [True] * 4 + [False] * 4
    monkeypatch.setattr(neighbours, "_used_bytes", lambda: 97 * MIB)
    assert neighbours.make_room(97 * MIB) == 4
    assert neighbours.segments == 0
    assert all(external.client.exists(redis_name(span.key)) for span in mine), "the model's own stay"


def test_renewals_reach_redis(deployments: Any, external: RedisForTests) -> None:
    spans = chain(36, 3)
    fill(external.client, spans)
    deployment = deployments(url=external.url, expire_s=1000)
    deployment.until_ok()
    assert deployment.ask_tier("renew", [b"n" * 32, spans[1].key, spans[0].key]) == [b"n" * 32]
    assert [external.client.ttl(redis_name(span.key)) > 990 for span in spans] == [True, True, False]


def test_redis_is_not_indexed_while_a_deletion_of_its_last_life_runs(
    deployments: Any, external: RedisForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = chain(35, 3)
    fill(external.client, spans)
    deployment = deployments(url=external.url)
    deployment.until_ok()
    tier, may_delete, asked = deployment.tier, threading.Event(), threading.Event()
    delete, scanned_after = tier._store.delete, []

    def delete_slowly(keys: Any) -> int:
        assert may_delete.wait(patience(PATIENCE_S))
        return int(delete(keys))

    def noting(where: Any) -> Any:
        asked.set()
        scanned_after.append(may_delete.is_set())
        return read_index(where)

    monkeypatch.setattr(tier._store, "delete", delete_slowly)
    monkeypatch.setattr(redis_tier, "read_index", noting)
    evicting = asyncio.run_coroutine_threadsafe(tier.evict([spans[2].key]), deployment.loop)
    until(lambda: tier._deletions or evicting.done(), "the deletion runs")
    deployment.loop.call_soon_threadsafe(tier._start_over.set)
    until(lambda: deployment.report()["told"].count("registered") == 2, "a new life is told")
    deployment.wait_for(asyncio.to_thread(lambda: None))  # behind whatever the tier's threads have begun by now
    assert not asked.is_set()
    may_delete.set()
    report = deployment.until_ok(after=1)
    assert scanned_after == [True]
    assert set(report["kept"]) == {span.key for span in spans[:2]}


def test_what_the_manager_has_no_room_for_is_deleted(deployments: Any, external: RedisForTests) -> None:
    spans = chain(4, 5)
    fill(external.client, spans)
    report = deployments(url=external.url, room=3).until_ok()
    assert set(report["kept"]) == {span.key for span in spans[:3]}
    assert [bool(external.client.exists(redis_name(span.key))) for span in spans] == [True] * 3 + [False] * 2


def test_an_external_redis_keeps_what_belongs_to_others(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(5, 2), fingerprint=OTHER_FINGERPRINT)
    fill(external.client, chain(5, 2), namespace="another")
    external.client.set("anything", "else")
    assert deployments(url=external.url).until_ok()["kept"] == {}
    assert len(keys_but_the_claim(external)) == 5


def test_evictions_reach_redis(deployments: Any, external: RedisForTests) -> None:
    spans = chain(6, 3)
    fill(external.client, spans)
    deployment = deployments(url=external.url)
    deployment.until_ok()
    assert deployment.ask("evict", [spans[2].key, b"n" * 32]) == 1
    assert not external.client.exists(redis_name(spans[2].key))
    assert external.client.exists(redis_name(spans[1].key))


def test_a_stopped_redis_is_lost_and_indexed_again_when_it_runs(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(7, 2))
    deployment = deployments(url=external.url, deadline_s=0.3)
    before = len(deployment.until_ok()["told"])
    access = deployment.tier._access
    opened, open_it = [0], access.open

    def open_again() -> Any:
        opened[0] += 1
        return open_it()

    access.open = open_again
    os.kill(external.server.pid or 0, signal.SIGSTOP)
    try:
        until(lambda: opened[0] >= 3, "it was tried again")
        assert sum(told.startswith("lost: ") for told in deployment.report()["told"][before:]) == 1
        assert "does not answer in time" in deployment.report()["told"][-1]
        assert "does not answer in time" in deployment.ask_tier("stats")["state"]
        with pytest.raises(RedisUnavailableError, match="does not answer in time"):
            deployment.ask("evict", [b"k" * 32])
    finally:
        os.kill(external.server.pid or 0, signal.SIGCONT)
    assert len(deployment.until_ok(after=1)["kept"]) == 2


def test_a_killed_embedded_server_is_started_again_with_its_data(deployments: Any, tmp_path: Path) -> None:
    deployment = deployments(folder=str(tmp_path))
    report = deployment.until_ok()
    store, span = open_store(report["endpoint"]), chain(8, 1)[0]
    store.put(span.key, sealed(span))
    pid = connect(report["endpoint"].url, 5.0).info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)
    again = deployment.until_ok(after=1)
    assert f"lost: {redis_tier.SERVER_ENDED}" in again["told"]
    assert set(again["kept"]) == {span.key}
    assert store.get(span.key) == sealed(span).tobytes(), "who knew its endpoint need not learn another"


def test_an_embedded_server_that_takes_no_connections_has_ended_though_its_process_is_there_yet(
    deployments: Any, tmp_path: Path
) -> None:
    deployment = deployments(folder=str(tmp_path))
    report = deployment.until_ok()
    Path(report["endpoint"].url.rpartition("@")[2]).unlink()  # as a process refuses them that is being killed
    assert f"lost: {redis_tier.SERVER_ENDED}" in deployment.until_ok(after=1)["told"]


def test_a_redis_that_was_restarted_empty_is_a_new_life(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(9, 2))
    deployment = deployments(url=external.url)
    assert len(deployment.until_ok()["kept"]) == 2
    external.client.flushall()
    external.client.config_set("appendonly", "no")
    os.kill(external.server.pid or 0, signal.SIGKILL)
    until(lambda: not external.server.running, "the server is dead")
    external.start()
    assert deployment.until_ok(after=1)["kept"] == {}


def test_a_new_manager_is_told_everything_again(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(10, 3))
    deployment = deployments(url=external.url)
    deployment.until_ok()
    deployment.start_manager(fingerprint=None)
    until(lambda: "waits for the first replica" in deployment.report()["state"], "the tier has met the new manager")
    deployment.ask("set_fingerprint", FINGERPRINT)
    report = deployment.until_ok()
    assert report["told"] == ["registered", "indexed"]
    assert len(report["kept"]) == 3
    assert len(keys_but_the_claim(external)) == 3


def test_an_application_of_another_model_gets_that_models_segments(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(11, 2))
    fill(external.client, chain(12, 3), fingerprint=OTHER_FINGERPRINT)
    deployment = deployments(url=external.url)
    assert len(deployment.until_ok()["kept"]) == 2
    deployment.ask("set_fingerprint", OTHER_FINGERPRINT)
    report = deployment.until_ok(after=1)
    assert len(report["kept"]) == 3
    assert report["endpoint"].fingerprint == OTHER_FINGERPRINT


def test_two_deployments_never_manage_one_namespace(deployments: Any, external: RedisForTests) -> None:
    first, second = deployments(url=external.url), deployments(url=external.url, fingerprint=None)
    first.until_ok()
    second.ask("set_fingerprint", FINGERPRINT)
    until(lambda: "is used by another crosskv server" in second.report()["state"], "the second is refused")
    assert "namespace 'tests' of this Redis" in second.report()["state"]
    assert "set kv.redis_namespace" in second.report()["state"]
    assert second.report()["told"] == []

    first.ask_tier("close")  # a clean end gives the claim up
    second.until_ok()


def test_who_loses_its_claim_stops_managing(deployments: Any, external: RedisForTests) -> None:
    deployment = deployments(url=external.url)
    deployment.until_ok()
    external.client.set(owner_key("tests", FINGERPRINT), "host elsewhere, process 1, id")
    until(lambda: "host elsewhere, process 1)" in deployment.report()["told"][-1], "the manager is told")
    external.client.delete(owner_key("tests", FINGERPRINT))  # the other's claim ends
    deployment.until_ok(after=1)


def test_two_namespaces_live_side_by_side(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(13, 2))
    first, second = deployments(url=external.url), deployments(url=external.url, namespace="tests2")
    assert len(first.until_ok()["kept"]) == 2
    assert second.until_ok()["kept"] == {}


def test_an_unusable_redis_is_explained_and_the_tier_lives_on(deployments: Any, external: RedisForTests) -> None:
    deployment = deployments(url="unix://:s3cret@/nonexistent/socket")
    until(lambda: "no Redis can be reached at unix:///nonexistent/socket" in deployment.report()["state"], "the reason")
    assert deployment.report()["told"] == []
    assert "s3cret" not in deployment.report()["state"]


def test_an_external_redis_own_limit_bounds_the_budget_while_it_lasts(
    deployments: Any, external: RedisForTests
) -> None:
    limit = external.client.config_get("maxmemory")["maxmemory"]
    external.client.config_set("maxmemory", 20 * MIB)
    try:
        deployment = deployments(url=external.url)
        assert deployment.until_ok()["budget"] == 16 * MIB
    finally:
        external.client.config_set("maxmemory", limit)
    until(lambda: deployment.ask_tier("stats")["maxmemory_bytes"] == int(limit), "the tier has seen the new limit")
    deployment.start_manager(FINGERPRINT)
    assert deployment.until_ok()["budget"] == 64 * MIB


def test_the_index_is_told_in_chunks(
    deployments: Any, external: RedisForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redis_tier.ADOPT_CHUNK == 1000
    spans = chain(15, 2500)
    fill(external.client, spans)
    assert list(deployments(url=external.url).until_ok()["kept"].values()) == spans


def test_an_endpoint_names_what_the_workers_need(deployments: Any, external: RedisForTests) -> None:
    report = deployments(url=external.url, expire_s=77, deadline_s=0.7).until_ok()
    assert report["endpoint"] == endpoint(external.url, expire_s=77, deadline_s=0.7)


def test_a_manager_that_was_replaced_while_the_index_was_told_makes_nothing_be_deleted(
    deployments: Any, external: RedisForTests
) -> None:
    fill(external.client, chain(16, 3))
    deployment = deployments(url=external.url, fingerprint=None)

    class Replaced(Manager):
        async def adopt_redis(self, *args: Any) -> list[bytes]:
            deployment.manager = Manager(FINGERPRINT, deployment.room)
            return []  # what the new one answers to a life that it does not know

    deployment.manager = Replaced(FINGERPRINT, deployment.room)
    assert len(deployment.until_ok()["kept"]) == 3


def test_a_redis_that_is_loading_its_data_is_waited_for_without_alarm(
    deployments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_records: Any
) -> None:
    with_data = RedisForTests(tmp_path)
    fill(with_data.client, chain(17, 300))
    with_data.stop()
    slowly = "key-load-delay 5000\n"  # microseconds
    monkeypatch.setattr(redis_server, "_CONFIGURATION", redis_server._CONFIGURATION + slowly)
    # It reads for 1.5 s, and says nothing meanwhile: longer than the deadline.
    report = deployments(folder=str(tmp_path), deadline_s=1.0).until_ok()
    assert len(report["kept"]) == 300
    assert any("is loading its data" in state for state in report["states"])
    assert not any("does not answer" in state for state in report["states"])
    assert not [record for record in own_records() if record.levelname == "WARNING"]


def test_a_redis_that_has_read_its_data_by_the_time_its_silence_is_noticed_was_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RedisTierConfig(
        app_name="app", url="embedded", folder=str(tmp_path), namespace="tests", budget_bytes=MIB, expire_s=0,
        deadline_s=1.0,
    )  # fmt: skip
    access: Any = RedisAccess(config)
    access._server = server = SimpleNamespace(start=lambda: None, url="unix://:p@/nonexistent/socket", loading=True)

    def check(*_: Any) -> None:
        server.loading = False
        raise RedisUnavailableError("it does not answer in time")

    monkeypatch.setattr(redis_access, "check", check)
    with pytest.raises(RedisLoadingError, match="is loading its data"):
        access.open()


def test_a_manager_that_does_not_answer_is_told_later(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(18, 2))
    deployment = deployments(url=external.url, fingerprint=None)

    class Absent(Manager):
        async def register_redis(self, *args: Any) -> None:
            raise ManagerUnavailableError("the KV manager is not running")

    deployment.manager = Absent(FINGERPRINT, deployment.room)
    until(lambda: "are not registered" in deployment.ask_tier("stats")["state"], "the state says so")
    deployment.start_manager(FINGERPRINT)
    assert len(deployment.until_ok()["kept"]) == 2
