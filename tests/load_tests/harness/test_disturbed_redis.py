"""A disturbed Redis: as often as told, below the checks, in whatever process the endpoint is opened."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from deployments.redis_tier.config import RedisTierConfig
from deployments.segment_store.base import StoreUnavailableError
from deployments.segment_store.endpoint import open_store
from kvmanager.segments.server_secret import ServerSecret
from load_tests.harness.disturbed_redis import Disturbance, FaultyStore, StoreFaults, disturbed
from load_tests.harness.emulated_link import EmulatedLink

KEY = b"k" * 32
CONFIG = RedisTierConfig("app", "unix:///nonexistent", "", "tests", 1 << 20, 0, 1.0)


class Store:
    """Has what is asked for."""

    def get(self, key: bytes) -> bytearray:
        return bytearray(1000)

    def put(self, key: bytes, header: Any, body: Any) -> None: ...

    def delete(self, keys: Any) -> int:
        return len(keys)

    def headers(self) -> Any:
        return iter([[]])


def faulty(**faults: float) -> FaultyStore:
    return FaultyStore(Store(), StoreFaults(**faults), random.Random(1))


def test_one_byte_is_damaged_as_often_as_told() -> None:
    store = faulty(corrupt_share=0.25)
    damaged = [1000 - bytes(store.get(KEY) or b"").count(0) for _ in range(400)]
    assert set(damaged) == {0, 1}
    assert 60 <= sum(damaged) <= 140


def test_calls_fail_as_often_as_told_and_the_index_is_spared() -> None:
    store, failed = faulty(error_share=0.25), 0
    for call in [lambda: store.get(KEY), lambda: store.put(KEY, b"", b""), lambda: store.delete([KEY])] * 100:
        try:
            call()
        except StoreUnavailableError:
            failed += 1
    assert 40 <= failed <= 110
    always = faulty(error_share=1.0)
    assert list(always.headers()) == [[]]
    assert always.delete([]) == 0, "an index that found nothing unwanted"


@pytest.mark.parametrize(
    ("disturbance", "layer"), [(StoreFaults(error_share=0.5), "FaultyStore"), (EmulatedLink(1e6), "LinkedStore")]
)
def test_a_disturbance_travels_with_the_endpoint_to_whoever_opens_it(disturbance: Disturbance, layer: str) -> None:
    config = pickle.loads(pickle.dumps(disturbed(CONFIG, disturbance)))
    endpoint = config.endpoint("unix:///nonexistent", b"F" * 32, ServerSecret(bytes(32)), b"")
    store: Any = open_store(pickle.loads(pickle.dumps(endpoint)))
    assert [type(store._inner).__name__, type(store._inner._inner).__name__] == ["GuardedStore", layer]
    assert endpoint != CONFIG.endpoint("unix:///nonexistent", b"F" * 32, ServerSecret(bytes(32)), b"")
