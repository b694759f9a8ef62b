"""What the Ray cluster must be before the application is built in it, however it was started.

`make serve` starts one that passes. `serve run` starts or joins another, of which nothing is known before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from app.gate.bound_host import is_loopback
from configs.settings import Settings, SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """`stores` has each node's address and the bytes of its object store; `has_token`: calls need a token."""

    stores: Mapping[str, int]
    has_token: bool

    def refusal(self, tier_bytes: int) -> str | None:
        """Why nothing is to be built here, in one sentence that says what works; None when all is well."""
        open_at = [address for address in self.stores if not is_loopback(address)]
        if open_at and not self.has_token:
            return (
                f"Ray: any client of {open_at[0]} can run code in this cluster, for it asks for no token; start with "
                f"`make serve`, or set RAY_AUTH_MODE=token wherever Ray is started (docs/guide/redis.md, Several "
                f"machines)."
            )
        for address, store_bytes in self.stores.items():
            if tier_bytes > store_bytes:
                return (
                    f"kv.cpu_tier_bytes: {tier_bytes} bytes do not fit the object store of Ray at {address}, which "
                    f"holds {store_bytes}; use at most {store_bytes // 5 * 4}, start Ray with a larger "
                    f"--object-store-memory, or start with `make serve`."
                )
        return None

    def warning(self) -> str | None:
        """What a server on one machine does not need."""
        (address, *others) = self.stores
        if others or is_loopback(address):
            return None
        return (
            f"Ray listens on {address}, beyond this machine; only its token guards it. "
            f"Where no other machine is to join, start with `make serve`, or with "
            f"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment: both bind it to loopback."
        )


def check_cluster(settings: Settings) -> None:
    """Raises SettingsError when the cluster that this process belongs to is open to strangers or too small.

    Outside a cluster there is nothing to check. Of Ray this leans on `is_token_auth_enabled` and `ray.nodes`.
    """
    if not ray.is_initialized():
        return
    stores = {
        node["NodeManagerAddress"]: int(node["Resources"].get("object_store_memory", 0))
        for node in ray.nodes()
        if node["Alive"]
    }
    cluster = Cluster(stores, is_token_auth_enabled())
    refusal = cluster.refusal(int(settings.kv.cpu_tier_bytes) if settings.kv.enabled else 0)
    if refusal is not None:
        raise SettingsError(refusal)
    warning = cluster.warning() if stores else None
    if warning is not None:
        logger.warning("%s", warning)
