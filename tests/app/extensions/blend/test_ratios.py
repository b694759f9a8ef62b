"""How much of a blended prompt is recomputed, and that its names say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.extensions.blend import requests
from app.extensions.blend.requests import RatioRule
from app.gate.kv_cache_field import KVCacheField
from app.openai.prompt_keys import PromptKeys
from configs.settings import load_settings
from kvmanager.segments.server_secret import ServerSecret

SECRET, FINGERPRINT = ServerSecret(bytes(32)), bytes(32)


def test_the_salt_of_each_ratio_of_a_blend_is_another_and_the_rule_says_which_it_is() -> None:
    def salt(ratio: float | None = None, **rule: Any) -> str:
        derive = PromptKeys(SECRET, FINGERPRINT, 32, variants={"blended": RatioRule(**rule).variant})
        return derive.salt("alice", "x", KVCacheField("blended", ratio))

    assert len({salt(ratio) for ratio in (0.0, 0.05, 0.15, 0.5, 0.95, 1.0)}) == 6
    assert salt() == salt(0.15) == salt(0.14), "by sixteenths"
    assert salt(deployment=1.0) == salt(1.0)


def test_where_nobody_names_a_ratio_it_is_the_calibrated_one_else_cacheblends() -> None:
    own, asked = RatioRule(0.0, 0.3), KVCacheField("blended", 0.9)
    assert [own.of(asked), own.of()] == [0.9, 0.0], "0 is a ratio"
    assert [RatioRule(calibrated=0.3).of(), RatioRule().of()] == [0.3, 0.15]


@pytest.mark.parametrize(("profile", "ratio"), [(None, 0.15), (SimpleNamespace(recompute_ratio=0.07), 0.07)])
def test_the_calibration_beside_the_weights_is_read_at_start(
    monkeypatch: pytest.MonkeyPatch, profile: Any, ratio: float
) -> None:
    monkeypatch.setattr(requests, "read_blend_profile", lambda model: profile)
    assert RatioRule.from_settings(load_settings({})).of() == ratio
    assert RatioRule.from_settings(load_settings({"blending": {"recompute_ratio": 0.6}})).of() == 0.6
