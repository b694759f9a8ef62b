"""The KV manager's configuration, from the settings, and a check before its start that it can work."""

from __future__ import annotations

from collections.abc import Mapping

from configs.settings import Settings, SettingsError
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Tier
from kvmanager.loading.load_choice import LoadChoice, LoadMode
from kvmanager.manager import KVManager
from kvmanager.routing.cost import STARTING_CREDITS
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.server_secret import ServerSecret

MOST_RENEW_S = 3600.0
RENEW_SHARE = 1 / 24
"""Of `kv.redis_expire_s`: what is used is renewed in Redis no more often than that, nor than once an hour."""


def manager_config(settings: Settings) -> ManagerConfig:
    """Pick it out of the settings."""
    kv = settings.kv
    return ManagerConfig(
        blocks_per_segment=settings.blocks_per_segment,
        block_tokens=settings.block_size_tokens,
        load_or_recompute=kv.load_or_recompute,
        extensions=tuple(kv.load_paths),
        load_base_s=kv.load_deadline_s,
        lease_s=kv.lease_s,
        save_s=kv.lease_s,
        max_ghosts=kv.max_ghosts,
        redis_min_uses=kv.redis_min_uses,
        redis_renew_s=min(MOST_RENEW_S, kv.redis_expire_s * RENEW_SHARE),
        eviction_policy=kv.eviction_policy,
        pin_budget_bytes=int(kv.pin_budget_bytes),
    )


def pin_shares(settings: Settings, secret: ServerSecret) -> dict[str, int] | None:
    """Bytes that may be pinned, by the tag of each tenant; None without tenants: all clients share the budget.

    What `tenants.NAME.pin_bytes` says; the others share the rest of `kv.pin_budget_bytes` evenly.
    """
    tenants, own = settings.http.tenants, settings.of_tenants("pin_bytes")
    if not tenants:
        return None
    rest = int(settings.kv.pin_budget_bytes) - sum(own.values())
    even = rest // max(1, len(tenants) - len(own))
    return _by_tag({tenant: own.get(tenant, even) for tenant in tenants}, secret)


def tenant_quotas(settings: Settings, secret: ServerSecret) -> dict[Tier, dict[str, int]]:
    """Bytes by tier and by the tag that a tenant has in the index."""
    return {
        Tier.CPU: _by_tag(settings.of_tenants("cpu_bytes"), secret),
        Tier.REDIS: _by_tag(settings.of_tenants("redis_bytes"), secret),
    }


def require_policy(settings: Settings) -> str:
    """Name the policy. Raises SettingsError, in one sentence, where `kv.eviction_policy` is none that can be used."""
    try:
        KVManager(manager_config(settings), epoch=0)
    except ValueError as error:
        raise SettingsError(f"kv.eviction_policy: {error}.") from None
    return settings.kv.eviction_policy


def _by_tag(quotas: Mapping[str, int], secret: ServerSecret) -> dict[str, int]:
    return {tenant_tag(secret, tenant): int(nbytes) for tenant, nbytes in quotas.items()}


def load_choice(config: ManagerConfig) -> LoadChoice:
    """What decides between loading and recomputing, nothing measured yet."""
    return LoadChoice(
        LoadMode(config.load_or_recompute),
        config.block_tokens,
        config.block_tokens * config.blocks_per_segment,
        config.load_base_s,
        STARTING_CREDITS,
    )
