"""What single tenants have of their own, and what settings that are gone say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from configs.errors import field_names
from configs.removed import REMOVED
from configs.settings import Settings, SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

KEYS = {"http": {"api_keys": {"key-a": "alice", "key-b": "bob"}}}


def with_tenants(**tenants: Any) -> Settings:
    return load_settings({**KEYS, "tenants": tenants})


def test_a_tenant_has_what_is_set_for_it_and_the_servers_else() -> None:
    settings = with_tenants(alice={"weight": 2, "cpu_bytes": "1MiB", "tokens_per_minute": 0}, bob={})
    assert settings.of_tenants("weight") == {"alice": 2.0, "bob": 1.0}
    assert settings.of_tenants("cpu_bytes") == {"alice": 1024**2}
    assert settings.of_tenants("tokens_per_minute") == {"alice": 0}, "no limit is a limit of its own"
    assert settings.of_tenants("fidelity") == {}


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ({"eve": {}}, "tenants: 'eve' is no tenant of http.api_keys; use one of ['alice', 'bob']."),
        ({"alice": {"weight": 0}}, "tenants.alice.weight: it must be greater than or equal to 0.01, not 0."),
        ({"alice": {"cpu_bytes": 0}}, "tenants.alice.cpu_bytes: it must be greater than 0, not 0."),
        ({"alice": {"weigth": 2}}, "tenants.alice.weigth: there is no such setting"),
        ({"alice": {"cpu_bytes": "1GiB"}, "bob": {"cpu_bytes": "1GiB"}}, "more than kv.cpu_tier_bytes"),
        ({"alice": {"redis_bytes": "2GiB"}}, "tenants: their redis_bytes add up to 2147483648 bytes"),
        ({"alice": {"pin_bytes": "2GiB"}}, "more than kv.pin_budget_bytes"),
    ],
)
def test_what_cannot_be_is_one_sentence(tenants: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        with_tenants(**tenants)
    assert said in str(refused.value)


def test_without_keys_there_are_no_tenants() -> None:
    with pytest.raises(SettingsError, match=r"tenants: no tenant has a key; give each one in http\.api_keys first"):
        load_settings({"tenants": {"alice": {"weight": 2}}})


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_that_is_gone_is_refused_with_what_replaces_it(name: str) -> None:
    assert name not in field_names(Settings)
    args: dict[str, Any] = {}
    *sections, last = name.split(".")
    place = args
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = {"alice": 1}
    with pytest.raises(SettingsError) as refused:
        load_settings(args)
    assert str(refused.value) == f"{name}: {REMOVED[name]}"


def test_what_one_tenant_had_of_its_own_is_refused_by_the_tenants_name() -> None:
    with pytest.raises(SettingsError) as refused:
        with_tenants(alice={"recompute_ratio": 0.3})
    assert str(refused.value) == f"tenants.alice.recompute_ratio: {REMOVED['tenants.NAME.recompute_ratio']}"


@pytest.mark.parametrize("name", [name for name in REMOVED if "`tenants: {" in REMOVED[name]])
def test_the_form_that_a_tenants_refused_setting_shows_can_be_set(name: str) -> None:
    shown = REMOVED[name].split("`")[1].replace("NAME", "alice")
    assert load_settings({**KEYS, **yaml.safe_load(shown)}).tenants["alice"].model_fields_set
