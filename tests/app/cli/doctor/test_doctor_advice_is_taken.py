"""What the doctor advises is something with which a server starts, whatever it was set to and whatever was seen."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from app.cli.doctor.advice import Advice
from app.cli.doctor.command import examine
from app.cli.doctor.figures import CodecUse, Figures, Setup, TierFill, Traffic
from app.cli.doctor.gathered import setup_of
from app.control.settings_shown import settings_shown, shape_of_kv
from app.launch.memory import check_memory, shared_memory_warning
from configs import machine
from configs.model_folder import find_model, kv_shape, own_max_tokens
from configs.settings import Settings, SettingsError, load_settings
from tests.sizes import LONG

MIB = 1024**2
GIB = 1024 * MIB


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """What people may have set, not all of which goes together."""
    most = draw(st.integers(1, 6))
    tiers = st.one_of(st.just(0), st.sampled_from((1, 64, 512, 1024, 3000)).map(lambda mib: mib * MIB))
    tenants = draw(st.sampled_from(((), ("acme",))))
    kv: dict[str, Any] = {
        "cpu_tier_bytes": draw(tiers),
        "redis_url": draw(st.sampled_from(("embedded", None, "redis://elsewhere:6379/0"))),
        "redis_bytes": draw(st.sampled_from((64, 1024, 3000))) * MIB,
        "redis_required": draw(st.booleans()),
        "redis_codec": draw(st.sampled_from((None, "raw", "lossless"))),
        "redis_min_uses": draw(st.sampled_from((1, 2))),
        "redis_expire_s": draw(st.sampled_from((0, 3600))),
        "fidelity": draw(st.sampled_from(("exact", "tolerant", "blended"))),
        "load_or_recompute": draw(st.sampled_from(("auto", "load"))),
        "prefetch_workers": draw(st.sampled_from((1, 2, 33, 64))),
        "ttft_target_s": draw(st.sampled_from((None, 0.1))),
        "layerwise": {"enabled": draw(st.sampled_from(("auto", "on", "off")))},
    }
    args: dict[str, Any] = {
        "dtype": draw(st.sampled_from(("auto", "float32", "bfloat16"))),
        "replicas": draw(st.sampled_from((most, {"min": draw(st.integers(1, most)), "max": most}))),
        "engine": {
            "threads": draw(st.integers(1, 4)),
            "tensor_parallel_size": draw(st.sampled_from((1, 2))),
            "device_blocks": draw(st.sampled_from((64, 256, 8192))),
        },
        "kv": kv,
        "http": {"api_keys": {f"a-secret-of-{tenant}": tenant for tenant in tenants}},
        "blending": {"separators": draw(st.sampled_from((None, ["\n\n"], [[5, 6]])))},
    }
    if tenants and draw(st.booleans()):
        args["tenants"] = {"acme": {"cpu_bytes": MIB}}
    if isinstance(args["replicas"], int) and most > 1 and draw(st.booleans()):
        args["roles"] = {"prefill": most - 1}
    return args


counts = st.sampled_from((0, 60, 1000))
TRAFFIC = st.builds(
    Traffic,
    plans=st.fixed_dictionaries({"evicted": counts, "cold": counts, "hit": counts}),
    tokens=st.fixed_dictionaries({"cpu": counts, "redis": counts, "recomputed": st.just(10_000)}),
    ttft_s=st.just(5.0),
    load_share=st.just(0.6),
    tiers=st.fixed_dictionaries({"redis": st.sampled_from((TierFill(9, 10), TierFill(1, 10)))}),
    codecs=st.just({"lossless": CodecUse(10, 1000, 9.0)}),
    credits=st.sampled_from(({}, {"cpu": 0.0}, {"cpu": 0.9, "redis": -0.1})),
    chunk_tokens=st.sampled_from((0, 500)),
    device_pool_bytes=st.sampled_from((None, 500 * MIB)),
)


def machine_of(patch: pytest.MonkeyPatch, memory: int, shared: int, cpu_dtype: str) -> None:
    free = SimpleNamespace(f_bavail=shared // 4096, f_frsize=4096)
    patch.setattr(machine, "accelerator", lambda: "cpu")
    patch.setattr(machine, "memory_bytes", lambda: memory)
    patch.setattr(machine, "cpu_dtype", lambda: cpu_dtype)
    patch.setattr(os, "statvfs", lambda path: free)


def setup(found: Settings) -> Setup:
    folder = find_model(found.model)
    shape, longest = kv_shape(folder), own_max_tokens(folder)
    assert shape
    assert longest
    return setup_of(settings_shown(found, shape_of_kv(*shape, found, longest)))


def with_advice(args: dict[str, Any], advice: Advice) -> dict[str, Any]:
    changed = copy.deepcopy(args)
    for name, value in {advice.setting: advice.value, **advice.also}.items():
        *path, last = name.replace("NAME", "acme").split(".")
        place = changed
        for part in path:
            place = place.setdefault(part, {})
        place[last] = yaml.safe_load(value)
    return changed


@settings(max_examples=200 if LONG else 80, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    arguments(), TRAFFIC, st.sampled_from((4, 8, 16, 64)), st.sampled_from((1, 6, 40)),
    st.sampled_from(("float32", "bfloat16")), st.integers(1, 8),
)  # fmt: skip
def test_a_server_starts_with_what_is_advised(
    args: dict[str, Any], traffic: Traffic, memory_gib: int, shared_gib: int, cpu_dtype: str, cores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine_of(patch, memory_gib * GIB, shared_gib * GIB, cpu_dtype)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        try:
            before = load_settings(args)
            check_memory(before)
            slow = shared_memory_warning(before)
        except SettingsError:
            assume(False)
        for advice in examine(Figures(traffic, setup(before))).advice:
            event(f"{advice.name}: {advice.setting}")
            after = load_settings(with_advice(args, advice))
            check_memory(after)
            assert shared_memory_warning(after) is None or slow is not None
