"""Codec profiles in a real Redis: they are there as long as what was coded with them, and meet no scan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis_fixture import OTHER_FINGERPRINT, SECRET, RedisForTests, chain, endpoint, fields_of, redis_name
from redis_fixture import sealed as random_segment
from small_codecs import SmallKit, SmallProfile, kv_segment

import kernels
from deployments.redis_tier.actor import read_index
from deployments.segment_store import redis_profiles
from deployments.segment_store.base import StoreUnavailableError
from deployments.segment_store.codec_files import find_profile, model_digest, profile_path
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.endpoint import open_coded_store, open_profiles, open_store
from deployments.segment_store.redis_connection import ACL_RIGHTS
from deployments.segment_store.redis_profiles import FIELD, MARGIN_S, RedisProfiles
from deployments.segment_store.segment_codecs import Coding
from kvmanager.segments.format import HEADER_BYTES, MismatchReason, SegmentMismatch, read_header
from kvmanager.segments.guard import ContentTag
from kvmanager.segments.server_secret import ServerSecret

PROFILE = SmallProfile(5)
NAME = b"crosskv:1:tests:profile:" + PROFILE.digest.hex().encode()
SPANS = chain(1, 3)
TOLERANT = Coding("lossless", "cachegen", 2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _empty(running: RedisForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    running.empty()
    monkeypatch.setattr(kernels, "codecs", SmallKit(), raising=False)
    monkeypatch.setitem(sys.modules, "kernels.codecs", kernels.codecs)


def profiles(running: RedisForTests, **changes: Any) -> RedisProfiles:
    return open_profiles(endpoint(running.url, **changes))


def test_a_profile_comes_back_and_lies_in_the_namespace(running: RedisForTests) -> None:
    found = profiles(running)
    assert found.get(PROFILE.digest) is None
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    assert running.client.keys() == [NAME]
    assert found.get(PROFILE.digest) == PROFILE.to_bytes()
    assert profiles(running, fingerprint=OTHER_FINGERPRINT).get(PROFILE.digest) == PROFILE.to_bytes()
    assert profiles(running, namespace="tests2").get(PROFILE.digest) is None


def test_it_is_written_once_and_renewed_for_longer_than_a_segment_each_time(running: RedisForTests) -> None:
    found = profiles(running, expire_s=1000)
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    assert 1000 + MARGIN_S - 10 <= running.client.ttl(NAME) <= 1000 + MARGIN_S
    running.client.expire(NAME, 5)
    found.keep(PROFILE.digest, b"not written again")
    assert running.client.ttl(NAME) >= 1000 + MARGIN_S - 10
    assert found.get(PROFILE.digest) == PROFILE.to_bytes()
    running.client.delete(NAME)  # it had expired, or was evicted
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    assert found.get(PROFILE.digest) == PROFILE.to_bytes()


def test_all_profiles_can_be_renewed_though_nothing_is_coded_with_them(
    running: RedisForTests,
) -> None:
    found = profiles(running, expire_s=1000)
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    running.client.expire(NAME, 5)
    profiles(running, expire_s=1000).renew_all()
    assert running.client.ttl(NAME) > 1000 + MARGIN_S - 10


def test_where_segments_do_not_expire_profiles_do_not(running: RedisForTests) -> None:
    for _ in range(2):
        profiles(running, expire_s=0).keep(PROFILE.digest, PROFILE.to_bytes())
        assert running.client.ttl(NAME) == -1


def test_what_is_far_too_large_is_not_read(running: RedisForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_profiles, "MOST_PROFILE_BYTES", 100)
    tags = ContentTag(SECRET)
    running.client.hset(NAME, FIELD, tags.tagged(NAME, b"x" * 85))
    assert profiles(running).get(PROFILE.digest) is None
    running.client.hset(NAME, FIELD, tags.tagged(NAME, b"x" * 84))
    assert profiles(running).get(PROFILE.digest) == b"x" * 84


@pytest.mark.parametrize(
    "planted",
    [
        PROFILE.to_bytes(),
        ContentTag(ServerSecret(bytes(32))).tagged(NAME, PROFILE.to_bytes()),
        ContentTag(SECRET).tagged(NAME + b"0", PROFILE.to_bytes()),
    ],
    ids=["without a tag", "under another secret", "another name's"],
)
def test_a_profile_that_was_planted_is_not_read_and_does_not_stay(running: RedisForTests, planted: bytes) -> None:
    running.client.hset(NAME, FIELD, planted)
    found = profiles(running)
    assert found.get(PROFILE.digest) is None
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    assert found.get(PROFILE.digest) == PROFILE.to_bytes()


def test_a_redis_that_fails_is_unavailable(running: RedisForTests) -> None:
    nobody = open_profiles(endpoint("unix:///nonexistent/socket"))
    for call in (lambda: nobody.get(PROFILE.digest), lambda: nobody.keep(PROFILE.digest, b"x")):
        with pytest.raises(StoreUnavailableError):
            call()
    running.client.set(NAME, "of another type")
    with pytest.raises(StoreUnavailableError):
        profiles(running).get(PROFILE.digest)


def test_the_rights_of_a_user_suffice(running: RedisForTests) -> None:
    running.client.execute_command("ACL", "SETUSER", "kv", "on", ">secret", *ACL_RIGHTS.split())
    found = open_profiles(endpoint(running.user_url("kv", "secret")))
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    found.keep(PROFILE.digest, PROFILE.to_bytes())
    assert found.get(PROFILE.digest) == PROFILE.to_bytes()


# Segments beside them.


def test_segments_of_both_fidelities_come_back_and_their_profile_survives_the_index(running: RedisForTests) -> None:
    where = endpoint(running.url, coding=TOLERANT)
    store = open_coded_store(where, CodecMeter())
    sizes = [store.put(span.key, kv_segment(span, "tolerant").data) for span in SPANS[:2]]
    sizes.append(store.put(SPANS[2].key, kv_segment(SPANS[2]).data))
    found = read_index(where)
    assert found.unusable == []
    assert sorted(header.sealed_bytes for header in found.headers) == sorted(sizes)
    assert {header.raw_sealed_bytes for header in found.headers} == {kv_segment(SPANS[0]).nbytes}
    again = open_coded_store(where, CodecMeter())
    exact, tolerant = (np.asarray(again.get(span.key)) for span in (SPANS[2], SPANS[0]))
    assert exact.tobytes() == kv_segment(SPANS[2]).tobytes()
    assert read_header(tolerant.tobytes()).fidelity == "tolerant"


def test_a_profile_is_renewed_with_each_segment_that_needs_it(running: RedisForTests) -> None:
    store = open_coded_store(endpoint(running.url, coding=TOLERANT), CodecMeter())
    store.put(SPANS[0].key, kv_segment(SPANS[0], "tolerant").data)
    (name,) = running.client.keys(b"crosskv:1:tests:profile:*")
    running.client.expire(name, 5)
    store.put(SPANS[1].key, kv_segment(SPANS[1], "tolerant").data)
    assert running.client.pttl(name) > running.client.pttl(redis_name(SPANS[1].key))


def test_a_segment_whose_profile_is_gone_is_a_mismatch(running: RedisForTests) -> None:
    where = endpoint(running.url, coding=TOLERANT)
    open_coded_store(where, CodecMeter()).put(SPANS[0].key, kv_segment(SPANS[0], "tolerant").data)
    running.client.delete(*running.client.keys(b"crosskv:1:tests:profile:*"))
    with pytest.raises(SegmentMismatch) as refused:
        open_coded_store(where, CodecMeter()).get(SPANS[0].key)
    assert refused.value.reason is MismatchReason.PROFILE


def test_what_the_format_before_left_in_redis_is_refused_by_its_version_and_listed_for_deletion(
    running: RedisForTests,
) -> None:
    whole = bytearray(random_segment(SPANS[0]).tobytes())
    whole[8:10] = (3).to_bytes(2, "little")
    old = bytes(whole[:192]) + bytes(whole[HEADER_BYTES:])  # its header was shorter
    fields = {"h": old[:192], "0": old[192:]}
    running.client.hset(redis_name(SPANS[0].key), mapping=fields)
    running.client.hset(redis_name(SPANS[1].key), mapping=fields_of(bytes(whole)))
    store = open_store(endpoint(running.url))
    for span in SPANS[:2]:
        with pytest.raises(SegmentMismatch) as refused:
            store.get(span.key)
        assert refused.value.reason is MismatchReason.VERSION
    assert sorted(read_index(endpoint(running.url)).unusable) == sorted(s.key for s in SPANS[:2])


# On disk.


def test_the_profile_of_a_models_weights_is_found_and_no_other(tmp_path: Path, own_records: Any) -> None:
    folder, model, other = tmp_path / "profiles", tmp_path / "model", tmp_path / "other"
    for place, weights in ((folder, b""), (model, b"weights"), (other, b"others!")):
        place.mkdir()
        (place / "model.safetensors").write_bytes(weights)
    own = SmallProfile(5, model_digest(str(model)))
    assert find_profile(str(folder), str(model)) is None
    profile_path(str(folder), str(model)).write_bytes(own.to_bytes())
    assert find_profile(str(folder), str(model)) == (own.digest, own.to_bytes())
    assert find_profile(str(folder), str(other)) is None
    assert find_profile("", str(model)) is None
    assert find_profile(str(tmp_path / "nowhere"), str(model)) is None
    assert not own_records()
    for content in (own.to_bytes(), b"garbage"):
        profile_path(str(folder), str(other)).write_bytes(content)
        assert find_profile(str(folder), str(other)) is None
    assert [record.message.count("is not used") for record in own_records()] == [1, 1]


def test_weights_that_differ_at_their_end_are_other_weights(tmp_path: Path) -> None:
    names = set()
    for number in range(3):
        (tmp_path / "a.safetensors").write_bytes(bytes(3 << 20) + bytes([number]))
        names.add(model_digest(str(tmp_path)))
    assert len(names | {model_digest("org/model"), model_digest("org/model2")}) == 5


def test_an_endpoint_of_another_coding_is_another_endpoint() -> None:
    where = endpoint("unix://somewhere")
    assert replace(where, coding=TOLERANT) != where, "or workers would not be started anew"
