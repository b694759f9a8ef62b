"""Every piece of advice: figures that provoke it, and figures close by where it is silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.command import RULES, examine
from app.cli.doctor.figures import LEAST_PROMPTS, CodecUse, Figures, Setup, TierFill, Traffic
from app.cli.doctor.rules.ordinary_text import times_in_ordinary_text
from configs.errors import field_names
from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings

MIB = 1024**2

TRAFFIC = Traffic(
    plans={"hit": 60, "cold": 30, "device": 10},
    tokens={"device": 3000, "cpu": 2000, "redis": 1000, "recomputed": 4000},
    ttft_s=0.5,
    load_share=0.1,
    tiers={"cpu": TierFill(300 * MIB, 1024 * MIB), "redis": TierFill(300 * MIB, 1024 * MIB)},
    codecs={"lossless": CodecUse(encoded=100, decoded=20, decoding_s=0.2)},
    credits={"cpu": 0.9, "redis": 0.5},
    device_pool_bytes=100 * MIB,
)
SETUP = Setup(
    accelerator="cpu",
    cores=4,
    cpu_dtype="bfloat16",
    dtype="bfloat16",
    threads=1,
    replicas=2,
    block_tokens=32,
    device_blocks=256,
    kv_bytes_per_token=8 * 1024,
    layerwise="auto",
    redis="embedded",
    redis_codec="lossless",
    form_level="off",
    redis_bytes=1024 * MIB,
    redis_expire_s=604_800,
    redis_min_uses=1.0,
    cpu_tier_bytes=1024 * MIB,
    load_or_recompute="auto",
    prefetch_workers=2,
    ttft_target_s=2.0,
)
WELL = Figures(TRAFFIC, SETUP)

LOW = {"tokens": {"device": 100, "cpu": 50, "redis": 50, "recomputed": 9800}}
NEVER_SEEN = {**LOW, "plans": {"cold": 90, "hit": 10}}
EVICTED = {**LOW, "plans": {"evicted": 40, "hit": 60}}
FULL_REDIS = {"tiers": {"redis": TierFill(1000 * MIB, 1024 * MIB)}}
HOT_IN_REDIS = {
    "codecs": {"lossless": CodecUse(100, 1000, 9.5), "raw": CodecUse(0, 5, 0.0)},
    "tokens": {"device": 10, "cpu": 10, "redis": 9000, "recomputed": 100},
}
LATE = {"ttft_s": 5.0, "load_share": 0.6}


def figures(traffic: dict[str, Any] | None = None, setup: dict[str, Any] | None = None) -> Figures:
    return Figures(replace(TRAFFIC, **(traffic or {})), replace(SETUP, **(setup or {})))


def advice(name: str, seen: Figures) -> Advice | None:
    return next((one for one in examine(seen).advice if one.name == name), None)


PROVOKED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("compress-cold-data", FULL_REDIS, {"redis_codec": "raw"}, "kv.redis_codec", "lossless"),
    ("compress-cold-data", {"refused_demotions": 3}, {"redis_codec": "raw"}, "kv.redis_codec", "lossless"),
    ("compress-cold-data", FULL_REDIS, {"tenants": 2}, "tenants.NAME.fidelity", "tolerant"),
    ("compress-cold-data", FULL_REDIS, {}, "kv.fidelity", "tolerant"),
    ("compress-cold-data", FULL_REDIS, {"tenant_fidelity": {"a": "tolerant"}}, "kv.sparse", "layers"),
    ("compressing-hot-data", HOT_IN_REDIS, {}, "kv.cpu_tier_bytes", str(2048 * MIB)),
    ("volatile-heads", {"parted": {"date": 18, "id": 2}}, {}, "", "put the date behind"),
    ("volatile-heads", {"parted": {"billing": 30}}, {}, "", "switch the client's billing line off"),
    ("volatile-heads", {"parted": {"other": 100}}, {}, "", "put what differs behind"),
    ("blend-chunks", {**NEVER_SEEN, "chunk_tokens": 500}, {}, "kv.fidelity", "blended"),
    ("blend-chunks", NEVER_SEEN, {"separators": ["<|doc|>"]}, "kv.fidelity", "blended"),
    ("blend-chunks", NEVER_SEEN, {}, "kv.fidelity", "blended"),
    ("keep-kv-longer", EVICTED, {"redis": None}, "kv.redis_url", "embedded"),
    ("keep-kv-longer", EVICTED, {"redis": None, "cpu_tier_bytes": 0}, "kv.cpu_tier_bytes", str(1024 * MIB)),
    ("keep-kv-longer", EVICTED, {"redis": None, "memory_bytes": 2100 * MIB}, "kv.redis_url", "redis://HOST:6379/0"),
    ("keep-kv-longer", {**EVICTED, **FULL_REDIS}, {}, "kv.redis_bytes", str(2048 * MIB)),
    ("keep-kv-longer", EVICTED, {"redis_min_uses": 2.0}, "kv.redis_min_uses", "1"),
    ("keep-kv-longer", EVICTED, {}, "kv.redis_expire_s", str(4 * 604_800)),
    ("tier-slower-than-recompute", {"credits": {"redis": 0.0, "cpu": 0.9}}, {}, "kv.redis_url", "null"),
    ("tier-slower-than-recompute", {"credits": {"cpu": -0.2}}, {"redis": None}, "kv.cpu_tier_bytes", "0"),
    (
        "tier-slower-than-recompute",
        {"credits": {"redis": 0.0}},
        {"load_or_recompute": "load"},
        "kv.load_or_recompute",
        "auto",
    ),
    ("hide-loads", LATE, {}, "kv.layerwise.enabled", "on"),
    ("hide-loads", LATE, {"layerwise": "off"}, "kv.layerwise.enabled", "auto"),
    ("hide-loads", {**LATE, "tokens": {"cpu": 10, "redis": 90}}, {}, "kv.prefetch_workers", "4"),
    ("separator-in-ordinary-text", {}, {"separators": [[17], "\n\n"]}, "blending.separators", "null"),
    (
        "separator-in-ordinary-text",
        {},
        {"separators": [[5, 6]], "page_tokens": [1, 5, 5, 6, 2]},
        "blending.separators",
        "null",
    ),
    ("cpu-tier-below-device-pool", {}, {"cpu_tier_bytes": 199 * MIB}, "kv.cpu_tier_bytes", str(200 * MIB)),
    (
        "cpu-tier-below-device-pool",
        {"device_pool_bytes": None},
        {"cpu_tier_bytes": 127 * MIB},
        "kv.cpu_tier_bytes",
        str(128 * MIB),
    ),
    ("compressing-hot-data", HOT_IN_REDIS, {"memory_bytes": 5000 * MIB}, "kv.cpu_tier_bytes", str(1476 * MIB)),
    ("keep-kv-longer", {**EVICTED, **FULL_REDIS}, {"memory_bytes": 5000 * MIB}, "kv.redis_bytes", str(1476 * MIB)),
    (
        "keep-kv-longer",
        {**EVICTED, **FULL_REDIS},
        {"memory_bytes": 1, "redis": "external"},
        "kv.redis_bytes",
        str(2048 * MIB),
    ),
    (
        "cpu-tier-below-device-pool",
        {},
        {"cpu_tier_bytes": 50 * MIB, "redis": None, "memory_bytes": 300 * MIB + 5},
        "kv.cpu_tier_bytes",
        str(150 * MIB),
    ),
    ("slow-dtype", {}, {"dtype": "float32"}, "dtype", "auto"),
    ("slow-dtype", {}, {"cpu_dtype": "float32"}, "dtype", "auto"),
    ("more-threads-than-cores", {}, {"threads": 3}, "engine.threads", "2"),
    ("more-threads-than-cores", {}, {"replicas": 5}, "replicas", "4"),
    ("more-threads-than-cores", {}, {"ranks": 2, "threads": 2}, "engine.threads", "1"),
    ("more-threads-than-cores", {}, {"ranks": 2, "replicas": 3}, "replicas", "2"),
    ("more-threads-than-cores", {}, {"ranks": 8}, "engine.tensor_parallel_size", "1"),
]

SILENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("compress-cold-data", {}, {"redis_codec": "raw"}),
    ("compress-cold-data", FULL_REDIS, {"fidelity": "tolerant", "form_level": "layers"}),
    ("compress-cold-data", {"tiers": {}}, {"redis_codec": "raw"}),
    ("compressing-hot-data", {"codecs": HOT_IN_REDIS["codecs"]}, {}),
    ("compressing-hot-data", {"tokens": HOT_IN_REDIS["tokens"]}, {}),
    ("compressing-hot-data", {**HOT_IN_REDIS, "codecs": {"raw": CodecUse(1, 1000, 0.0)}}, {}),
    ("volatile-heads", {"parted": {"date": 17, "id": 2, "defect": 90}}, {}),
    ("volatile-heads", {"parted": {"date": 0}}, {}),
    ("blend-chunks", {**NEVER_SEEN, "tokens": TRAFFIC.tokens}, {}),
    ("blend-chunks", EVICTED, {}),
    ("blend-chunks", {**NEVER_SEEN, "chunk_tokens": 5000}, {}),
    ("blend-chunks", NEVER_SEEN, {"fidelity": "blended"}),
    ("keep-kv-longer", {**EVICTED, "tokens": TRAFFIC.tokens}, {}),
    ("keep-kv-longer", NEVER_SEEN, {}),
    ("keep-kv-longer", EVICTED, {"redis_expire_s": 0}),
    ("tier-slower-than-recompute", {"credits": {}}, {}),
    ("tier-slower-than-recompute", {"credits": {"cpu": 0.0, "redis": 0.0}}, {"load_or_recompute": "recompute"}),
    ("tier-slower-than-recompute", {"credits": {"cpu": 0.0, "redis": 0.5}}, {}),
    ("tier-slower-than-recompute", {"credits": {"cpu": -0.2}}, {"redis": None, "roles": True}),
    ("tier-slower-than-recompute", {"credits": {"cpu": -0.2}}, {"redis": None, "tenant_cpu_bytes": {"acme": 1}}),
    ("hide-loads", {**LATE, "ttft_s": 1.9}, {}),
    ("hide-loads", {**LATE, "load_share": 0.29}, {}),
    ("hide-loads", LATE, {"layerwise": "on"}),
    ("hide-loads", {**LATE, "tokens": {"redis": 90}}, {"prefetch_workers": 64}),
    ("separator-in-ordinary-text", {}, {"separators": ["<|doc|>", " # # ", [17, 4]]}),
    ("separator-in-ordinary-text", {}, {"separators": [[5, 6]], "page_tokens": [1, 5, 2, 6, 5]}),
    ("cpu-tier-below-device-pool", {}, {"cpu_tier_bytes": 200 * MIB}),
    ("cpu-tier-below-device-pool", {"nodes": 2}, {"cpu_tier_bytes": 100 * MIB}),
    ("cpu-tier-below-device-pool", {}, {"cpu_tier_bytes": 0}),
    ("cpu-tier-below-device-pool", {}, {"cpu_tier_bytes": 199 * MIB, "memory_bytes": 2 * (1024 + 199) * MIB}),
    ("compressing-hot-data", HOT_IN_REDIS, {"memory_bytes": 4096 * MIB}),
    ("keep-kv-longer", {**EVICTED, **FULL_REDIS}, {"memory_bytes": 4096 * MIB}),
    ("slow-dtype", {}, {"dtype": "float16"}),
    ("slow-dtype", {}, {"cpu_dtype": "float32", "memory_bytes": 8192 * MIB, "replica_bytes": {"float32": 2048 * MIB}}),
    ("slow-dtype", {}, {"dtype": "float32", "accelerator": "cuda"}),
    ("slow-dtype", {}, {"dtype": "float32", "cpu_dtype": "float32"}),
    ("more-threads-than-cores", {}, {"threads": 2}),
    ("more-threads-than-cores", {}, {"ranks": 2}),
    ("more-threads-than-cores", {"nodes": 2}, {"threads": 4}),
    ("more-threads-than-cores", {}, {"threads": 64, "accelerator": "cuda"}),
]


@pytest.mark.parametrize(("name", "traffic", "setup", "setting", "value"), PROVOKED)
def test_advice_is_given(name: str, traffic: dict[str, Any], setup: dict[str, Any], setting: str, value: str) -> None:
    given = advice(name, figures(traffic, setup))
    assert given is not None
    assert given.setting == setting
    assert given.value.startswith(value)
    assert given.evidence
    assert given.why


@pytest.mark.parametrize(
    ("name", "traffic", "setup", "also"),
    [
        ("slow-dtype", {}, {"cpu_dtype": "float32"}, {}),
        ("tier-slower-than-recompute", {"credits": {"redis": 0.0}}, {"redis_required": True},
         {"kv.redis_required": "false"}),
        ("more-threads-than-cores", {}, {"replicas": 5, "roles": True}, {"roles.prefill": "0"}),
        ("keep-kv-longer", EVICTED, {"redis": None, "memory_bytes": 3000 * MIB}, {"kv.redis_bytes": str(476 * MIB)}),
    ],
)  # fmt: skip
def test_what_has_to_be_set_with_it_is_named(
    name: str, traffic: dict[str, Any], setup: dict[str, Any], also: dict[str, str]
) -> None:
    given = advice(name, figures(traffic, setup))
    assert given is not None
    assert given.also == also


def test_bounds_of_replicas_stay_bounds_where_they_can() -> None:
    for least, value in ((2, "{min: 2, max: 4}"), (4, "4"), (None, "4")):
        given = advice("more-threads-than-cores", figures({}, {"replicas": 5, "least_replicas": least}))
        assert given is not None
        assert given.value == value


@pytest.mark.parametrize(("name", "traffic", "setup"), SILENT)
def test_close_by_it_is_silent(name: str, traffic: dict[str, Any], setup: dict[str, Any]) -> None:
    assert advice(name, figures(traffic, setup)) is None


def test_every_rule_is_provoked_and_silenced() -> None:
    names = {rule.name for rule in RULES}
    assert names == {one[0] for one in PROVOKED} == {one[0] for one in SILENT}


def test_a_server_that_is_well_gets_no_advice() -> None:
    assert examine(WELL).advice == ()


@pytest.mark.parametrize(("name", "traffic", "setup"), [one[:3] for one in PROVOKED])
def test_on_too_little_traffic_only_settings_are_judged(
    name: str, traffic: dict[str, Any], setup: dict[str, Any]
) -> None:
    (rule,) = [one for one in RULES if one.name == name]
    few = figures({**traffic, "plans": {"evicted": LEAST_PROMPTS - 1}}, setup)
    assert (advice(name, few) is None) == rule.needs_traffic
    assert (name in examine(few).not_enough_seen) == rule.needs_traffic
    assert name not in examine(figures(traffic, setup)).not_enough_seen


def test_without_settings_and_without_traffic_nothing_is_said() -> None:
    assert examine(Figures(replace(TRAFFIC, **FULL_REDIS, credits={"cpu": 0.0}))).advice == ()
    assert examine(Figures()).advice == ()
    assert examine(Figures(Traffic(), Setup())).advice == ()


def test_the_gravest_comes_first() -> None:
    seen = figures(NEVER_SEEN, {"dtype": "float32"})
    assert [one.severity for one in examine(seen).advice] == [Severity.WARNING, Severity.INFO]


def test_what_is_advised_can_be_set_and_read_about() -> None:
    settings = set(field_names(Settings))
    for name, traffic, setup, *_ in PROVOKED:
        given = advice(name, figures(traffic, setup))
        assert given is not None
        assert given.setting in settings | {""}
        assert (PROJECT_ROOT / given.page.partition("#")[0]).is_file()


@pytest.mark.parametrize(
    "separator", ["\n\n", "\n", "---", "***", "# ", "## ", "Document ", "document", "Question:", ". "]
)
def test_separators_of_ordinary_text_are_known(separator: str) -> None:
    assert times_in_ordinary_text(separator)


@pytest.mark.parametrize("separator", ["<|doc|>", "[DOC]", " # # ", "<<<doc>>>", "\x1e", "@@@"])
def test_separators_that_nobody_writes_are_left_alone(separator: str) -> None:
    assert not times_in_ordinary_text(separator)
