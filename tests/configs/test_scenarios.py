"""A scenario fills what nobody has set, and nothing else; and never decides whose answers may be lossy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from configs import machine
from configs.errors import field_names
from configs.kv_section import KVSettings, LayerwiseSettings
from configs.model_folder import PROJECT_ROOT
from configs.presets import find_preset, find_scenario, preset_names, scenario_names
from configs.settings import Settings, SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

EACH = pytest.mark.parametrize("scenario", scenario_names())
THE_ISSUES = ["chat", "cost", "cross-node", "long-document", "rag", "short"]

CHOICES: dict[str, list[Any]] = {
    "max_model_len": [None, 1024],
    "replicas": [1, 2],
    "engine.scheduler": ["fcfs", "shortest", "mlfq"],
    "engine.max_num_seqs": [4, 32],
    "kv.redis_codec": ["lossless", "raw", None],
    "kv.tolerant_level": [1, 2, 3],
    "kv.sparse": ["off", "layers", "50"],
    "kv.save_answers": ["auto", "always", "never"],
    "kv.device_policy": ["lru", "hotness"],
    "kv.redis_min_uses": [1, 2, 5],
    "kv.redis_expire_s": [0, 60, 604_800],
    "kv.redis_url": [None, "embedded", "redis://127.0.0.1:6379/0"],
    "kv.fidelity": ["exact", "tolerant", "blended"],
    "kv.enabled": [True, False],
    "kv.layerwise.enabled": ["auto", "on", "off"],
    "blending.fill": ["idle", "first", "manual"],
    "blending.recompute_ratio": [None, 0.0, 0.3],
}
"""Settings and what people may set them to: all that any scenario sets, the defaults among the values, and others."""


def leaves(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def as_args(chosen: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for dotted, value in chosen.items():
        *sections, name = dotted.split(".")
        place = args
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return args


def value_of(settings: Settings, dotted: str) -> Any:
    value: Any = settings
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


CHOSEN = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()})


@given(st.sampled_from(THE_ISSUES), CHOSEN)
def test_whatever_is_set_stays_and_the_scenario_fills_only_the_rest(scenario: str, chosen: dict[str, Any]) -> None:
    args = as_args(chosen)
    before = copy.deepcopy(args)
    found, without = load_settings({**args, "scenario": scenario}), load_settings(args)
    assert args == before
    filled = leaves(find_scenario(scenario) or {})
    assert found.tenants == without.tenants
    for name in (name for name in field_names(Settings) if "NAME" not in name):
        expected = filled[name] if name in filled and name not in chosen else value_of(without, name)
        if not isinstance(expected, BaseModel) and name != "scenario":
            assert value_of(found, name) == expected, name


def test_the_property_chooses_everything_that_a_scenario_sets() -> None:
    assert scenario_names() == THE_ISSUES
    for scenario in THE_ISSUES:
        assert leaves(find_scenario(scenario) or {}).keys() <= CHOICES.keys()


@EACH
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_scenario_is_valid_and_all_that_it_says_is_so(
    scenario: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: accelerator)
    settings = load_settings({"scenario": scenario})
    assert settings.scenario == scenario
    for name, value in leaves(find_scenario(scenario) or {}).items():
        assert value_of(settings, name) == value


@EACH
def test_no_scenario_makes_an_exact_prompt_lossy(scenario: str) -> None:
    settings = load_settings({"scenario": scenario})
    assert (settings.kv.fidelity, settings.tenants) == ("exact", {})
    assert settings.redis_codec in ("lossless", "raw")


def test_without_a_scenario_all_is_as_it_was() -> None:
    for args in ({}, {"scenario": None}):
        assert load_settings(args) == Settings.model_construct(**dict(load_settings({})))
        assert not load_settings(args).model_fields_set - {"scenario"}


@pytest.mark.parametrize("wrong", ["RAG", "", "../models/qwen3-8b", "long_document", "chat.yaml"])
def test_an_unknown_scenario_is_refused_with_those_there_are(wrong: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"scenario": wrong})
    assert str(error.value) == (
        f"scenario: there is no scenario {wrong!r}; use one of {', '.join(THE_ISSUES)}, or leave it empty."
    )


@pytest.mark.parametrize("wrong", [3, ["rag"], {"rag": True}, True])
def test_what_is_no_name_is_refused_in_one_sentence(wrong: object) -> None:
    with pytest.raises(SettingsError, match=r"^scenario: it must be a valid string[^\n]*$"):
        load_settings({"scenario": wrong})


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"kv": None}, "kv"),
        ({"kv": "big"}, "kv"),
        ({"kv": {"layerwise": True}}, "kv.layerwise"),
        ({"kv": {"layerwise": {"enabled": "perhaps"}}}, "kv.layerwise.enabled"),
        ({"kv": {"save_answer": "never"}}, "kv.save_answer"),
    ],
)
@EACH
def test_a_wrong_setting_is_as_wrong_beside_a_scenario(scenario: str, args: dict[str, Any], names: str) -> None:
    with pytest.raises(SettingsError, match=f"^{names}: ") as beside:
        load_settings({**args, "scenario": scenario})
    with pytest.raises(SettingsError) as alone:
        load_settings(args)
    assert str(beside.value) == str(alone.value)


def test_a_section_given_as_an_object_says_what_was_set_in_it() -> None:
    kv = KVSettings(save_answers="auto", layerwise=LayerwiseSettings())
    settings = Settings(scenario="short", kv=kv)
    assert (settings.kv.save_answers, settings.kv.redis_codec) == ("auto", "raw")
    assert settings.kv.layerwise.enabled == "off"


def test_the_shipped_file_and_the_models_presets_leave_scenarios_their_say() -> None:
    shipped = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())["applications"][0]["args"]
    fragments = [shipped, *(find_preset(name) or {} for name in preset_names())]
    for scenario in scenario_names():
        set_by_it = leaves(find_scenario(scenario) or {}).keys()
        assert [leaves(fragment).keys() & set_by_it for fragment in fragments] == [set()] * len(fragments)
