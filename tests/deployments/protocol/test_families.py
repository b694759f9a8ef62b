"""Families of several parts, as one page shows them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from deployments.protocol.families import added


def part(seen: float, **counted: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Counter("crosskv_test_things", "Things.", ["kind"], registry=registry)
    for kind, number in counted.items():
        counter.labels(kind).inc(number)
    Histogram("crosskv_test_seconds", "Waits.", buckets=(1.0, 2.0), registry=registry).observe(seen)
    return registry


def test_samples_of_one_place_are_added_and_others_kept() -> None:
    families = added([*part(0.5, a=1, b=2).collect(), *part(1.5, b=3, c=4).collect()])
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert values == {
        ("crosskv_test_things_total", "a"): 1,
        ("crosskv_test_things_total", "b"): 5,
        ("crosskv_test_things_total", "c"): 4,
        ("crosskv_test_seconds_bucket", "1.0"): 1,
        ("crosskv_test_seconds_bucket", "2.0"): 2,
        ("crosskv_test_seconds_bucket", "+Inf"): 2,
        ("crosskv_test_seconds_count",): 2,
        ("crosskv_test_seconds_sum",): 2,
    }
    assert [family.name for family in families] == ["crosskv_test_things", "crosskv_test_seconds"]
