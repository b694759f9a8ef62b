"""What the manager is told out of the settings, and what is refused before the start."""

from __future__ import annotations

import pytest

from configs.settings import SettingsError, load_settings
from deployments.manager.config import manager_config, pin_shares, require_policy, tenant_quotas
from kvmanager.index.locations import Tier
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.server_secret import ServerSecret

SECRET = ServerSecret(bytes(32))


def test_every_policy_by_name_and_a_class_of_the_users_can_be_set():
    for name in ("lfu", "decayed-lfu", "lru", "kvmanager.eviction.policies.lru:Lru"):
        settings = load_settings({"kv": {"eviction_policy": name}})
        require_policy(settings)
        assert manager_config(settings).eviction_policy == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mru", "lfu"),
        ("arc", "choose one of lfu, decayed-lfu, lru"),
        ("nowhere:Class", "cannot be imported"),
        ("kvmanager.segments.keys:nothing", "cannot be imported"),
        ("kvmanager.segments.keys:tenant_tag", "EvictionPolicy"),
        ("kvmanager.index.eviction_policy:EvictionPolicy", "lacks methods"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence_before_the_start(name, says):
    with pytest.raises(SettingsError) as error:
        require_policy(load_settings({"kv": {"eviction_policy": name}}))
    assert str(error.value).startswith("kv.eviction_policy: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("expire_s", "renew_s"), [(604_800, 3600.0), (2400, 100.0), (0, 0.0)])
def test_what_is_used_is_renewed_in_redis_long_before_it_expires(expire_s, renew_s):
    assert manager_config(load_settings({"kv": {"redis_expire_s": expire_s}})).redis_renew_s == renew_s


def test_quotas_are_given_by_tag_in_bytes():
    args = {
        "http": {"api_keys": {"a": "alice", "b": "bob"}},
        "kv": {"pin_budget_bytes": 7},
        "tenants": {"alice": {"cpu_bytes": "1MiB"}, "bob": {"redis_bytes": 5}},
    }
    settings = load_settings(args)
    quotas = {Tier.CPU: {tenant_tag(SECRET, "alice"): 1024**2}, Tier.REDIS: {tenant_tag(SECRET, "bob"): 5}}
    assert tenant_quotas(settings, SECRET) == quotas
    assert manager_config(settings).pin_budget_bytes == 7


def test_the_pin_budget_is_shared_out_among_the_tenants_and_belongs_to_all_where_there_are_none():
    http = {"api_keys": {"a": "alice", "b": "bob", "c": "carol"}}
    args = {"http": http, "kv": {"pin_budget_bytes": 1000}, "tenants": {"alice": {"pin_bytes": 600}}}
    settings = load_settings(args)
    parts = {"alice": 600, "bob": 200, "carol": 200}
    assert pin_shares(settings, SECRET) == {tenant_tag(SECRET, name): part for name, part in parts.items()}
    assert pin_shares(load_settings({}), SECRET) is None
