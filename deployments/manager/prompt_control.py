"""Orders of people about one prompt's KV, other than pins and moves: eviction, compression, and dry runs of orders.

What cannot be done is answered in words, not raised. On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.replica_state import ReplicaState, names_by_rank
from deployments.manager.tier_registry import TierRegistry
from kvmanager.eviction.pins import PinBudgetError, PinReport, UnknownKeyError
from kvmanager.index.locations import Location, Tier
from kvmanager.index.nodes import Node
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Outcome
from kvmanager.moves.prompt_orders import Amount, NoRedisError, PinnedError
from kvmanager.segments.keys import HASH_BYTES, BlockHash, SegmentKey

_UNKNOWN = {"refused": "unknown_key", "message": "No KV of this prompt is known."}
_NO_NODE = {"refused": "unknown_key", "message": "There is no such node (any more)."}
_PINNED = {
    "refused": "pinned", "message": "A pin keeps it, or what follows on it. Unpin that first.", "outcome": "pinned",
}  # fmt: skip
_NO_NAME = {
    "refused": "not_named",
    "message": "Neither a device nor a CPU tier has all of it, so its blocks have no names here. Name the prompt.",
}
_NO_REDIS = {"refused": "no_redis", "message": "There is no Redis to store it in, or it cannot be used now."}


class PromptControl:
    """See the module's docstring. `begun` is called when there is work for the background."""

    def __init__(
        self,
        brain: KVManager,
        replicas: Mapping[str, ReplicaState],
        directives: DirectiveSender,
        tiers: TierRegistry,
        begun: Callable[[], None],
    ) -> None:
        self._brain = brain
        self._replicas = replicas
        self._directives = directives
        self._tiers = tiers
        self._begun = begun

    def would_clear(self, tiers: Sequence[str], tenant: str | None = None) -> dict[str, Any]:
        """What a clear would take, by tier. A device knows itself which of its blocks are whose: None for a tenant."""
        found: dict[str, Any] = {tier: {"segments": 0, "bytes": 0} for tier in tiers if tier != Tier.DEVICE.value}
        if tenant is None:
            for place in self._brain.stats(time.monotonic())["locations"]:
                if place["tier"] in found:
                    found[place["tier"]]["segments"] += place["segments"]
                    found[place["tier"]]["bytes"] += place["bytes"] - place["reserved_bytes"]
        else:
            for tier, share in self._brain.tenant_stats(time.monotonic(), tenant)["tiers"].items():
                if tier in found:
                    found[tier] = {"segments": share["segments"], "bytes": share["bytes"]}
        if Tier.DEVICE.value in tiers:
            held = self._brain.views.device_blocks
            names = sorted(names_by_rank(self._replicas).items())
            found[Tier.DEVICE.value] = None if tenant else {str(rank): {"blocks": held(name)} for rank, name in names}
        return found

    async def evict(
        self,
        hashes: Sequence[BlockHash],
        node: SegmentKey | None,
        whose: str | None,
        tiers: Sequence[str],
        replica: int | None,
        deadline_s: float,
        dry_run: bool,
    ) -> dict[str, Any]:
        """Take what only one prompt needs out of tiers (`kvmanager.moves.prompt_orders`), or say what would go.

        The prompt is named by its `hashes`, or by the key of a segment, a `node` of this tenant, with what follows on
        it; then not on devices, of whose blocks the index has only some. `replica`: on this one's device; None: on all.
        """
        orders = self._brain.orders
        path = orders.path_of(hashes) if node is None else orders.path_to(node, whose)
        if node is not None and not path:
            return dict(_NO_NODE)
        if replica is not None and replica not in names_by_rank(self._replicas):
            return {"refused": "no_replica", "message": f"There is no replica {replica}."}
        shared = [tier for tier in (Tier.CPU, Tier.REDIS) if tier.value in tiers]
        try:
            amounts = {tier: orders.would_evict(tier, path) for tier in shared}  # one may be pinned: before any goes
            begin = orders.own_from(hashes)
            if not dry_run:
                amounts = {tier: orders.evict(tier, path) for tier in shared}
        except PinnedError:
            return dict(_PINNED)
        answer: dict[str, Any] = {tier.value: _shown(amount) for tier, amount in amounts.items()}
        names = {rank: name for rank, name in names_by_rank(self._replicas).items() if replica in (None, rank)}
        devices = names if Tier.DEVICE.value in tiers and node is None else {}
        if dry_run:
            leading = self._brain.offloads.device_blocks
            found = {rank: max(0, leading(name, hashes) - begin) for rank, name in devices.items()}
            return answer | (
                {"device": {str(rank): {"blocks": count} for rank, count in found.items()}} if found else {}
            )
        self._tiers.send(self._brain.expire(time.monotonic()))
        self._begun()
        ended = await asyncio.gather(
            *(self._directives.evict(name, hashes[begin:], deadline_s) for name in devices.values())
        )
        if devices:
            blocks = {str(rank): one.blocks for rank, one in zip(devices, ended, strict=True)}
            answer["device"] = {rank: {"blocks": count} for rank, count in sorted(blocks.items())}
        well = Outcome.DONE, Outcome.REFUSED_GONE  # the latter: it has nothing of it
        failed = next((one.outcome.value for one in ended if one.outcome not in well), None)
        if failed is not None:
            return {**answer, "outcome": failed, "message": "Not every replica has evicted it in time."}
        return {**answer, "outcome": "done"}

    def would_move(self, hashes: Sequence[BlockHash], source: int, target: int) -> dict[str, Any]:
        """What a move would do: blocks that the target lacks, and what has to be stored for it first."""
        names = names_by_rank(self._replicas)
        for rank in (source, target):
            if rank not in names:
                return {"refused": "no_replica", "message": f"There is no replica {rank}."}
        offloads, node_id = self._brain.offloads, self._replicas[names[source]].node_id
        at_source, at_target = (offloads.device_blocks(names[rank], hashes) for rank in (source, target))
        stored = self._brain.stored_blocks([hashes])[0]
        lacking = offloads.lacking(names[source], hashes, Location(Tier.CPU, node_id))
        end, known = max(stored, at_source), self._brain.orders.path_of(hashes)
        loaded = [one for one in known if at_target < one.end_block <= end and one.copies is not None]
        return {
            "source_blocks": at_source,
            "target_blocks": at_target,
            "blocks": max(0, end - at_target),
            "store": {"segments": len(lacking)},
            "load": {"segments": len(loaded), "bytes": sum(one.nbytes for one in loaded)},
        }

    def pin_node(self, key: SegmentKey, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        """Pin, or with no time unpin, a node of this tenant, or for an administrator (None) anybody's: on its owner."""
        path = self._brain.orders.path_to(key, whose)
        if not path:
            return dict(_NO_NODE)
        owner, now = path[-1].tenant, time.monotonic()
        try:
            if ttl_s is None:
                return {"unpinned": len(self._brain.unpin(now, [key], owner))}
            report = self._brain.pin(now, [key], ttl_s, owner)
        except UnknownKeyError:
            return dict(_NO_NODE)
        except PinBudgetError as error:
            return {"refused": "pin_budget", "message": str(error)}
        except ValueError as error:
            return {"refused": "bad_value", "message": str(error)}
        return pinned(report)

    async def hashes_to(self, key: SegmentKey, whose: str | None) -> dict[str, Any]:
        """The `hashes` of the blocks up to the end of a node of this tenant (None: of anybody), from block 0 on.

        Devices' blocks are known here; of what only CPU tiers have they are asked, each for `ANSWER_S` at the longest.
        """
        path = self._brain.orders.path_to(key, whose)
        if not path:
            return dict(_NO_NODE)
        chain, parts = self._brain.views.chain(path)
        for names in parts:
            chain.hear(names)
            await asyncio.sleep(0)  # plans go in between
        for location, keys in by_cpu_tier(chain.unnamed()).items():
            for joined in await self._tiers.block_hashes(location.holder, keys):
                chain.hear(BlockHash(joined[at : at + HASH_BYTES]) for at in range(0, len(joined), HASH_BYTES))
        hashes = chain.names()
        return dict(_NO_NAME) if hashes is None else {"hashes": hashes}

    def compress(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Let the prompt's segments be copied to Redis now; `compressed` says how far that is."""
        if not self._tiers.redis_is_ready:
            return dict(_NO_REDIS)
        try:
            state = self._brain.orders.compress(hashes)
        except NoRedisError:
            return dict(_NO_REDIS)
        self._begun()
        return asdict(state) if state.segments else dict(_UNKNOWN)

    def compressed(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """How many of the prompt's segments are at Redis, and what they take there."""
        return asdict(self._brain.orders.compressed(hashes))


def by_cpu_tier(nodes: Iterable[Node]) -> dict[Location, list[SegmentKey]]:
    """The keys of segments by a CPU tier that has them; those that none has are left out."""
    found: dict[Location, list[SegmentKey]] = defaultdict(list)
    for node in nodes:
        for copy in node.all_copies():
            if copy.resident and copy.store.location.tier is Tier.CPU:
                found[copy.store.location].append(node.key)
                break
    return found


def pinned(report: PinReport) -> dict[str, Any]:
    """The answer to a pin."""
    return {
        "segments": report.segments, "bytes": report.nbytes, "pinned_bytes": report.pinned_bytes,
        "budget_bytes": report.budget_bytes,
    }  # fmt: skip


def _shown(amount: Amount) -> dict[str, Any]:
    return {"segments": amount.segments, "bytes": amount.nbytes, **({} if amount.complete else {"at_least": True})}
