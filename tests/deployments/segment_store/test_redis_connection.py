"""What is said of a Redis that cannot be used: one sentence that names the cure and no password."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_fixture import FINGERPRINT, RedisForTests, chain, endpoint, sealed, until

from deployments.redis_tier.access import NamespaceClaim, claimant_name, has_ended
from deployments.redis_tier.config import RedisTierConfig, check_now
from deployments.redis_tier.entries import namespace_root, owner_key, segment_prefix
from deployments.redis_tier.server import find_redis_server
from deployments.segment_store import redis_connection
from deployments.segment_store.endpoint import open_store
from deployments.segment_store.redis_connection import (
    ACL_RIGHTS,
    NEEDED_COMMANDS,
    RedisUnavailableError,
    check,
    connect,
)

ROOT = namespace_root("tests")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _empty(running: RedisForTests) -> None:
    running.empty()


def refusal(url: str, deadline_s: float = 5.0) -> str:
    """The sentence with which a Redis is refused."""
    with pytest.raises(RedisUnavailableError) as raised:
        check(connect(url, deadline_s), url, ROOT)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert "s3cret" not in sentence
    return sentence


def add_user(running: RedisForTests, rights: str) -> str:
    """The URL of a new user with these rights only."""
    running.client.execute_command("ACL", "SETUSER", "kv", "reset", "on", ">s3cret", *rights.split())
    return running.user_url("kv", "s3cret")


def use_everything(url: str) -> None:
    """All that the tier and the workers ever do to a Redis."""
    client = connect(url, 5.0)
    check(client, url, ROOT)
    store, spans = open_store(endpoint(url)), chain(1, 2)
    for span in spans:
        store.put(span.key, sealed(span))
    assert store.get(spans[0].key)
    assert sum(len(chunk.headers) for chunk in store.scan()) == 2
    assert store.delete([span.key for span in spans]) == 2
    claim = NamespaceClaim(client, owner_key("tests", FINGERPRINT), "me")
    assert claim.take() is None
    assert claim.take() is None
    claim.release()


def test_a_usable_redis_tells_its_facts(running: RedisForTests) -> None:
    facts = check(running.client, running.url, ROOT)
    assert facts.version.startswith(("Redis ", "Valkey "))
    assert len(facts.run_id) == 40
    assert facts.maxmemory_bytes > 0
    assert facts.used_memory_bytes > 0
    assert running.client.dbsize() == 0, "the check leaves nothing behind"


def test_the_documented_rights_are_enough_for_everything(running: RedisForTests) -> None:
    use_everything(add_user(running, ACL_RIGHTS))


@pytest.mark.parametrize("command", NEEDED_COMMANDS)
def test_without_one_right_the_sentence_names_it(running: RedisForTests, command: str) -> None:
    rights = [right for right in ACL_RIGHTS.split() if right != f"+{command}"]
    sentence = refusal(add_user(running, " ".join(rights)))
    assert f"'{command}'" in sentence
    assert f"+{command}" in sentence


def test_rights_to_the_wrong_keys_are_not_enough(running: RedisForTests) -> None:
    assert "~crosskv:*" in refusal(add_user(running, ACL_RIGHTS.replace("~crosskv:*", "~other:*")))


def test_a_wrong_password_is_named_as_such(running: RedisForTests) -> None:
    assert "refuses the user or password: set them in kv.redis_url" in refusal(running.user_url("default", "s3cret"))


def test_a_missing_password_is_named_as_such(running: RedisForTests) -> None:
    assert "refuses the user or password" in refusal("unix://" + running.url.rpartition("@")[2])


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert f"no Redis can be reached at redis://127.0.0.1:{port}: start it, or correct kv.redis_url" in refusal(
        f"redis://me:s3cret@127.0.0.1:{port}/0"
    )


def test_a_stopped_redis_is_given_up_at_the_deadline(running: RedisForTests) -> None:
    os.kill(running.server.pid or 0, signal.SIGSTOP)
    try:
        assert "does not answer in time: check it, or raise kv.load_deadline_s" in refusal(running.url, 0.1)
    finally:
        os.kill(running.server.pid or 0, signal.SIGCONT)
    check(connect(running.url, 5.0), running.url, ROOT)


@pytest.mark.parametrize("url", ["http://me:s3cret@host:6379", "localhost:6379", "s3cret"])
def test_another_scheme_is_refused_with_those_that_exist(url: str) -> None:
    assert "redis://, rediss:// or unix://" in refusal(url)


def test_an_unreadable_url_is_not_quoted() -> None:
    assert "percent-encoded" in refusal("redis://:s3cret@x@host:s3cret/0")


def test_what_never_answers_is_asked_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "redis://127.0.0.1:" in refusal(f"redis://127.0.0.1:{server.getsockname()[1]}", 0.1)
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()  # a second attempt would take the deadline once more


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"redis_version": "5.0.7"}, "is version 5.0.7; crosskv needs 6 or newer"),
        ({"redis_version": "7.2.4", "cluster_enabled": 1}, "cluster mode, which is not supported"),
        ({"redis_version": "7.2.4", "loading": 1, "loading_loaded_perc": "41.5"}, r"is loading its data \(42 %\)"),
    ],
)
def test_what_info_tells_is_judged(info: dict[str, Any], said: str) -> None:
    class Client:
        def info(self) -> dict[str, Any]:
            return info

    with pytest.raises(RedisUnavailableError, match=said):
        check(Client(), "redis://host", ROOT)  # type: ignore[arg-type]


CLUSTERS_OWN = 10_000
"""A cluster node's port for the other nodes is so much above the one for clients."""


def free_pair() -> int:
    """A port that is free, as the one of the cluster above it is."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + CLUSTERS_OWN):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


def takes_connections(place: Path) -> bool:
    """The socket's file is there a moment before anything listens at it."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(str(place))
        return True
    return False


def test_a_real_cluster_node_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    cluster = [
        "--cluster-enabled",
        "yes",
        "--bind",
        "127.0.0.1",
        "--port",
        str(free_pair()),
        "--unixsocket",
        str(place),
    ]
    process = subprocess.Popen([find_redis_server(), *cluster], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: takes_connections(place), "the cluster node listens")
        assert "cluster mode, which is not supported" in refusal(f"unix://{place}")
    finally:
        process.kill()
        process.wait()


def test_a_replica_is_refused_because_it_takes_no_segments(running: RedisForTests) -> None:
    running.client.replicaof("127.0.0.1", 1)
    try:
        assert "read-only replica: set kv.redis_url to the primary" in refusal(running.url)
    finally:
        running.client.replicaof("NO", "ONE")


def test_a_full_redis_is_usable(running: RedisForTests) -> None:
    limit = running.client.config_get("maxmemory")["maxmemory"]
    running.client.config_set("maxmemory", 1)
    try:
        check(running.client, running.url, ROOT)
    finally:
        running.client.config_set("maxmemory", limit)


# Two deployments at one Redis.


def test_a_claim_is_held_by_one_until_it_is_given_up(running: RedisForTests) -> None:
    key = owner_key("tests", FINGERPRINT)
    first, second = (NamespaceClaim(running.client, key, name) for name in ("first", "second"))
    assert first.take() is None
    assert second.take() == "first"
    second.release()
    assert running.client.get(key) == b"first", "only its owner gives a claim up"
    first.release()
    assert second.take() is None
    assert first.take() == "second"


def test_the_claim_of_a_process_that_has_ended_is_taken_at_once(running: RedisForTests) -> None:
    """A server that is restarted would not reuse what lies in Redis until its earlier claim ends by itself."""
    key = owner_key("tests", FINGERPRINT)
    ours = claimant_name()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    earlier = ours.replace(f"process {os.getpid()},", f"process {ended.pid},")
    elsewhere = earlier.replace("pid:[", "pid:[1")
    assert NamespaceClaim(running.client, key, elsewhere).take() is None
    assert NamespaceClaim(running.client, key, ours).take() == elsewhere, "its process cannot be seen here"
    running.client.unlink(key)
    assert NamespaceClaim(running.client, key, earlier).take() is None
    assert NamespaceClaim(running.client, key, ours).take() is None
    assert running.client.pttl(key) > 0, "it ends by itself, too"
    assert NamespaceClaim(running.client, key, claimant_name()).take() == ours, "a living one's is not taken"


@pytest.mark.parametrize(
    "name", ["", "me", "host h, process 1, x", "host h, process 99999999999999999999, {}." + 32 * "0"]
)
def test_what_does_not_say_whose_process_it_is_has_not_ended(name: str) -> None:
    here = claimant_name().rpartition(", ")[2].rpartition(".")[0]
    assert not has_ended(name.format(here))


def test_a_claim_ends_when_its_owner_does_not_renew_it_however_often_others_ask(running: RedisForTests) -> None:
    key = owner_key("tests", FINGERPRINT)
    first, second = (NamespaceClaim(running.client, key, name) for name in ("first", "second"))
    first.take()
    running.client.pexpire(key, 5_000)
    assert second.take() == "first"
    assert running.client.pttl(key) <= 5_000, "asking does not prolong another's claim"
    first.take()
    assert running.client.pttl(key) > 5_000, "renewing does"
    running.client.pexpire(key, 1)
    while running.client.exists(key):
        pass
    assert second.take() is None


def test_a_claim_is_renewed_in_a_full_redis(running: RedisForTests) -> None:
    claim = NamespaceClaim(running.client, owner_key("tests", FINGERPRINT), "me")
    claim.take()
    limit = running.client.config_get("maxmemory")["maxmemory"]
    running.client.config_set("maxmemory", 1)
    try:
        assert claim.take() is None
    finally:
        running.client.config_set("maxmemory", limit)


@pytest.mark.parametrize("namespace", ["", "a b", "a*", "a:b", "[a]", "x" * 65])
def test_a_namespace_that_would_mean_something_in_a_key_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"kv\.redis_namespace .* use 1 to 64 letters"):
        segment_prefix(namespace, FINGERPRINT)


# Before the start.


def config(url: str, folder: Path, **changes: Any) -> RedisTierConfig:
    return RedisTierConfig(
        **{
            "app_name": "app", "url": url, "folder": str(folder), "namespace": "tests", "budget_bytes": 1000,
            "expire_s": 0, "deadline_s": 0.5, **changes,
        }
    )  # fmt: skip


def test_a_configuration_that_works_is_passed(running: RedisForTests, tmp_path: Path) -> None:
    assert check_now(config(running.url, tmp_path)) is None
    assert check_now(config("embedded", tmp_path)) is None


def test_a_configuration_that_cannot_work_is_said_why(tmp_path: Path) -> None:
    assert "no Redis can be reached" in (check_now(config("unix:///nonexistent/socket", tmp_path)) or "")
    assert "rediss://" in (check_now(config("ftp://host", tmp_path)) or "")
    assert "kv.redis_namespace" in (check_now(config("embedded", tmp_path, namespace="*")) or "")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in (check_now(config("embedded", tmp_path / "file")) or "")


WRITELESS = {
    "NOREPLICAS": ({"min-replicas-to-write": "1"}, "fewer replicas than its min-replicas-to-write"),
    "OOM": ({"maxmemory": "1", "maxmemory-policy": "noeviction"}, "is full and takes no writes"),
}


@pytest.mark.parametrize(("limits", "says"), WRITELESS.values(), ids=WRITELESS)
def test_a_redis_that_answers_and_takes_no_writes_is_said_why(
    running: RedisForTests, tmp_path: Path, limits: dict[str, str], says: str
) -> None:
    before = {name: value for pattern in limits for name, value in running.client.config_get(pattern).items()}
    try:
        for name, value in limits.items():
            running.client.config_set(name, value)
        assert says in (check_now(config(running.url, tmp_path)) or "")
    finally:
        for name, value in before.items():
            running.client.config_set(name, value)
    assert check_now(config(running.url, tmp_path)) is None


def test_a_redis_that_cannot_save_is_said_why() -> None:
    error = redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots, but it cannot.")
    assert "takes no writes: it cannot save to its disk" in redis_connection.explain("redis://host", error)


def test_a_folder_in_use_is_no_obstacle_for_an_application_that_is_deployed_anew(running: RedisForTests) -> None:
    assert check_now(config("embedded", running.server._folder.path)) is None


def test_a_redis_with_little_memory_lowers_the_budget(tmp_path: Path) -> None:
    external = config("redis://host", tmp_path)
    assert [external.budget_below(limit) for limit in (0, 500, 1250, 2000)] == [1000, 400, 1000, 1000]
    assert config("embedded", tmp_path).budget_below(500) == 1000


def test_no_password_is_shown_by_any_of_the_data_classes(tmp_path: Path) -> None:
    shown = repr(config("redis://:s3cret@host", tmp_path)) + repr(endpoint("redis://:s3cret@host"))
    assert "s3cret" not in shown
    assert redis_connection.server_name("rediss://me:s3cret@host:1/0") == "rediss://host:1"


def test_idle_tcp_connections_are_kept_alive_and_a_late_answer_is_not_asked_for_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", 0.05)
        with pytest.raises(redis.exceptions.TimeoutError):
            client.ping()
        silent.setblocking(False)
        assert silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()
        options = client.connection_pool.connection_kwargs
        assert options["socket_keepalive"]
        assert options["socket_keepalive_options"][socket.TCP_KEEPIDLE] == 30


def test_a_connection_that_turns_out_to_be_dropped_when_it_is_used_costs_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answers in (b"+PONG\r\n", b""), (b"+PONG\r\n",):
                connection, _ = server.accept()
                with connection:
                    for answer in answers:
                        connection.recv(1024)
                        connection.sendall(answer)  # the last of the first: it ends without an answer

        thread = threading.Thread(target=serve)
        thread.start()
        client = connect(f"redis://127.0.0.1:{server.getsockname()[1]}/0", 10.0)
        assert [client.ping(), client.ping()] == [True, True]
        client.close()
        thread.join()
