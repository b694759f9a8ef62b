"""The Redis tier and what is coded: sizes that it tells, profiles that it brings, settings that it gets."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from redis_deployment import TIMES, Deployment
from redis_fixture import SECRET, RedisForTests, chain, endpoint, fields_of, redis_name, sealed, until
from small_codecs import SmallKit, SmallProfile, kv_segment

import kernels
from configs.kv_section import KVSettings
from configs.settings import load_settings
from deployments.redis_tier.config import RedisTierConfig
from deployments.segment_store.codec_files import model_digest, profile_path
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.endpoint import open_coded_store
from deployments.segment_store.redis_profiles import FIELD
from deployments.segment_store.segment_codecs import Coding
from kvmanager.segments.guard import ContentTag

TOLERANT = Coding("lossless", "cachegen", 2)
OWN = SmallProfile(5, model_digest("org/model"))
OWN_NAME = b"crosskv:1:tests:profile:" + OWN.digest.hex().encode()


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _small_codecs(external: RedisForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    external.empty()
    monkeypatch.setattr(kernels, "codecs", SmallKit(), raising=False)
    monkeypatch.setitem(sys.modules, "kernels.codecs", kernels.codecs)


@contextlib.contextmanager
def deployed(external: RedisForTests, **config: Any) -> Iterator[Any]:
    with contextlib.closing(Deployment(url=external.url, **config)) as running:
        yield running


def test_the_manager_is_told_what_each_segment_takes_in_redis_and_raw(external: RedisForTests) -> None:
    spans = chain(1, 3)
    store = open_coded_store(endpoint(external.url, coding=TOLERANT), CodecMeter())
    sizes = {span.key: store.put(span.key, kv_segment(span).data) for span in spans}
    with deployed(external) as running:  # whose fake manager compares the raw sizes
        assert running.until_ok()["sizes"] == sizes
        assert max(sizes.values()) < 16_832
        until(lambda: running.ask_tier("stats")["state"] == "ok", "its state is ok")


def test_what_an_older_release_left_in_redis_is_deleted_and_nothing_fails(external: RedisForTests) -> None:
    old, new = chain(2, 2)
    whole = bytearray(sealed(old).tobytes())
    whole[8] = 3
    external.client.hset(redis_name(old.key), mapping=fields_of(bytes(whole)))
    external.client.hset(redis_name(new.key), mapping={"h": bytes(whole[:192]), "0": bytes(whole[256:])})
    with deployed(external) as running:
        assert running.until_ok()["kept"] == {}
        assert running.ask_tier("stats")["unusable"] == 2
        until(lambda: not external.client.keys(redis_name(b"")[:20] + b"*"), "both are deleted")


def test_the_models_profile_is_brought_into_redis_and_kept_there(external: RedisForTests, tmp_path: Path) -> None:
    profile_path(str(tmp_path), "org/model").write_bytes(OWN.to_bytes())
    where = {"profiles_folder": str(tmp_path), "model": "org/model", "coding": TOLERANT, "expire_s": 1000}
    where |= {"times": replace(TIMES, profile_renewal_s=0.05)}
    with deployed(external, **where) as running:
        assert running.until_ok()["endpoint"].coding == Coding("lossless", "cachegen", 2, OWN.digest)
        until(
            lambda: external.client.hget(OWN_NAME, FIELD) == ContentTag(SECRET).tagged(OWN_NAME, OWN.to_bytes()),
            "the profile is there",
        )
        external.client.expire(OWN_NAME, 100)
        until(lambda: external.client.ttl(OWN_NAME) > 1000, "it is renewed though nobody writes")


def test_without_a_profile_of_this_model_there_is_none(external: RedisForTests, tmp_path: Path) -> None:
    profile_path(str(tmp_path), "org/other").write_bytes(OWN.to_bytes())
    with deployed(external, profiles_folder=str(tmp_path), model="org/other", coding=TOLERANT) as running:
        assert running.until_ok()["endpoint"].coding == TOLERANT
        opened = running.tier._facts
        until(lambda: running.tier._facts is not opened, "Redis was probed, which comes after profiles are kept")
        assert external.client.keys(b"*profile*") == []


@pytest.mark.parametrize(
    ("changes", "coding"),
    [
        ({}, Coding("raw", "cachegen", 2)),
        ({"redis_codec": "lossless"}, Coding("lossless", "cachegen", 2)),
        ({"redis_url": "redis://elsewhere", "tolerant_level": 3}, Coding("lossless", "cachegen", 3)),
    ],
)
def test_the_settings_say_how_segments_are_stored(changes: dict[str, Any], coding: Coding) -> None:
    settings = load_settings({"kv": changes})
    config = RedisTierConfig.from_settings(settings)
    assert config is not None
    assert config.coding == coding
    assert config.model == settings.model_source
    assert Path(config.profiles_folder).is_absolute()


@pytest.mark.parametrize("wrong", [{"redis_codec": "cachegen"}, {"tolerant_level": 0}, {"tolerant_level": 4}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KVSettings(**wrong)
