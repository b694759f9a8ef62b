"""What else this machine has room for: as much as a server starts with (`configs.settings`, `app.launch.memory`).

Memory is the ingress's machine's, taken for each node. Where it is not known, there is room.
"""

from __future__ import annotations

from app.cli.doctor.figures import Figures, Setup
from app.launch.cluster import store_bytes, tier_bytes_within
from app.launch.memory import BESIDE_REPLICAS_BYTES

MIB = 1024**2


def cpu_tier_within(figures: Figures, nbytes: int) -> int | None:
    """Return `nbytes` for the CPU tier, or as many bytes as there is room for; None: it has those."""
    setup = figures.setup or Setup()
    redis = _embedded_bytes(setup)
    limits = []
    if setup.memory_bytes is not None:
        limits.append(setup.memory_bytes // 2 - redis)
    if (left := _left_by_replicas(figures, setup.dtype)) is not None:
        limits.append(tier_bytes_within(left - redis))
    if setup.shared_memory_bytes is not None:  # on a disk loading is slow, and Ray may refuse that
        limits.append(tier_bytes_within(setup.shared_memory_bytes))
    return _within(nbytes, limits, setup.cpu_tier_bytes or 0)


def redis_within(figures: Figures, nbytes: int, now: int) -> int | None:
    """The same for an embedded Redis, which has `now`."""
    setup = figures.setup or Setup()
    tier = setup.cpu_tier_bytes or 0
    limits = []
    if setup.memory_bytes is not None:
        limits.append(setup.memory_bytes // 2 - tier)
    if (left := _left_by_replicas(figures, setup.dtype)) is not None:
        limits.append(left - store_bytes(tier))
    return _within(nbytes, limits, now)


def replicas_fit(figures: Figures, dtype: str) -> bool:
    """Whether there is room for the replicas in this type, with the tiers as they are."""
    setup = figures.setup or Setup()
    left = _left_by_replicas(figures, dtype)
    tier = (setup.cpu_tier_bytes or 0) if setup.kv_enabled else 0
    return left is None or store_bytes(tier) + _embedded_bytes(setup) <= left


def _left_by_replicas(figures: Figures, dtype: str | None) -> int | None:
    """Memory for the object store and an embedded Redis."""
    setup = figures.setup or Setup()
    each = setup.replica_bytes.get(dtype or "")
    if setup.memory_bytes is None or setup.replicas is None or each is None:
        return None
    of_a_node = -(-setup.replicas // figures.traffic.nodes)
    return setup.memory_bytes - BESIDE_REPLICAS_BYTES - of_a_node * each


def _embedded_bytes(setup: Setup) -> int:
    return (setup.redis_bytes or 0) if setup.kv_enabled and setup.redis == "embedded" else 0


def _within(nbytes: int, limits: list[int], now: int) -> int | None:
    most = min(limits, default=nbytes)
    found = nbytes if nbytes <= most else most // MIB * MIB
    return found if found > now else None
