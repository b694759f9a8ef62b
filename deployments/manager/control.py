"""The control API: its calls by name, and of them clearing, pins, prefetches, moves, and directives by name.

What cannot be done is answered in words, not raised. On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.index_watch import IndexWatch
from deployments.manager.prompt_control import PromptControl, pinned
from deployments.manager.replica_state import ReplicaState, names_by_rank
from deployments.manager.reports import Reports
from deployments.manager.tier_registry import TierRegistry
from kvmanager.eviction.pins import PinBudgetError, UnknownKeyError
from kvmanager.index.locations import Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directives import DirectiveKind, DirectiveResult, Move, Outcome
from kvmanager.segments.keys import BlockHash, SegmentKey

_SENTENCES = {
    Outcome.REFUSED_LATE: "The time was over before it could begin; try again with a longer deadline.",
    Outcome.REFUSED_FULL: "The device has no room for it that something colder has, or too much is under way there.",
    Outcome.REFUSED_GONE: "No KV of this prompt lies where it should be taken from.",
    Outcome.REFUSED_MODEL: "The model has windows or states: only a request brings its KV to a device, or saves it.",
    Outcome.FAILED: "A part of the cache that is needed for it did not answer, or had something else.",
    Outcome.LOST: "The replica did not answer in time.",
}


class Control:
    """Orders of people and other parts. `replicas` are the registered ones, by their unique names."""

    def __init__(
        self,
        brain: KVManager,
        replicas: Mapping[str, ReplicaState],
        directives: DirectiveSender,
        tiers: TierRegistry,
        watch: IndexWatch,
    ) -> None:
        self._brain = brain
        self._replicas = replicas
        self._directives = directives
        self._by_kind = {
            DirectiveKind.EVICT: directives.evict,
            DirectiveKind.OFFLOAD: directives.offload,
            DirectiveKind.ONBOARD: directives.onboard,
        }
        self._tiers = tiers
        self._watch = watch

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float, tenant: str = "") -> dict[str, Any]:
        """Keep the known beginning of a tenant's prompt in the shared tiers for `ttl_s`; `tenant` is its tag.

        Of a model with states also those that the prompt is loaded with: the last ones, and, where these are behind its
        last token, the ones before them.
        """
        try:
            keys = self._known_ends(hashes)
            states = self._brain.known_states(hashes)
            keys += list(states.values())[: 2 if len(hashes) in states else 1]
            report = self._brain.pin(time.monotonic(), keys, ttl_s, tenant)
        except UnknownKeyError:
            return _refused("unknown_key", "No KV of this prompt is known.")
        except PinBudgetError as error:
            return _refused("pin_budget", str(error))
        except ValueError as error:
            return _refused("bad_value", str(error))
        return pinned(report)

    def unpin(self, hashes: Sequence[BlockHash], tenant: str = "") -> dict[str, Any]:
        """End a tenant's pin."""
        try:
            keys = [*self._known_ends(hashes), *self._brain.known_states(hashes).values()]
            return {"unpinned": len(self._brain.unpin(time.monotonic(), keys, tenant))}
        except UnknownKeyError:
            return _refused("unknown_key", "No KV of this prompt is known.")

    async def clear(self, tiers: Sequence[str], deadline_s: float, tenant: str | None = None) -> dict[str, Any]:
        """Empty tiers everywhere, or of what one tenant (by tag) has there. Returns what was cleared, by tier.

        From now on no plan contains any of it. Leased segments stay until their lease ends. Waits until the tiers have
        evicted the others, `deadline_s` at the longest; what takes longer goes on.
        """
        cleared: dict[str, Any] = {}
        deadline = time.monotonic() + deadline_s
        shared = [tier for tier in (Tier.CPU, Tier.REDIS) if tier.value in tiers]
        before = {tier: self._brain.cleared(tier) for tier in shared}
        if shared:
            self._brain.offloads.leave_out_present(tenant)
            self._tiers.send(self._brain.clear(set(shared), tenant))
            self._watch.wake()
        if "device" in tiers:
            replicas = dict(self._replicas)
            clears = (self._directives.clear_device(name, tenant, deadline_s) for name in replicas)
            counts = await asyncio.gather(*clears)
            by_name = dict(zip(replicas, counts, strict=True))
            cleared["device"] = {str(rank): by_name[name] for rank, name in names_by_rank(replicas).items()}
        if shared:
            await self._watch.swept(max(0.0, deadline - time.monotonic()))
            await self._tiers.all_settled(shared, max(0.0, deadline - time.monotonic()))
        return cleared | {tier.value: self._brain.cleared(tier) - before[tier] for tier in shared}

    async def direct(
        self, kind: str, replica: str | int, hashes: Sequence[BlockHash], deadline_s: float
    ) -> dict[str, Any]:
        """Order a directive for the device of a replica, named by its unique name or its rank; answer when it ended.

        `hashes` are those of a prompt's blocks from block 0 on. Answers `outcome`
        (`kvmanager.moves.directives.Outcome`), `segments` and `blocks` that were changed, and, unless done, a
        `message`. Raises ValueError for a kind that one device does not carry out.
        """
        send = self._by_kind[DirectiveKind(kind)]
        name = self._named(replica)
        return {
            "kind": kind,
            **(_no_replica(replica) if name is None else _ended(await send(name, hashes, deadline_s))),
        }

    async def move(self, wanted: Move, deadline_s: float) -> dict[str, Any]:
        """Order a move, and answer as `direct`."""
        source, target = self._named(wanted.source), self._named(wanted.target)
        if source is None or target is None:
            missing = _no_replica(wanted.source if source is None else wanted.target)
            return {"kind": DirectiveKind.MOVE.value, **missing}
        ended = await self._directives.move(source, target, wanted, deadline_s)
        return {"kind": DirectiveKind.MOVE.value, **_ended(ended)}

    def _named(self, replica: str | int) -> str | None:
        """The unique name of a registered replica; None when there is none."""
        if isinstance(replica, str):
            return replica if replica in self._replicas else None
        return names_by_rank(self._replicas).get(replica)

    def _known_ends(self, hashes: Sequence[BlockHash]) -> list[SegmentKey]:
        keys = self._brain.known_ends(hashes)
        if not keys:
            raise UnknownKeyError
        return keys


class ManagerApi:
    """One table of the calls by name, made of the parts that carry them out.

    A call names a tenant by its tag; None: an administrator asks, for all tenants. A refusal is an answer
    `{"refused": reason, "message": sentence}`, not an exception.
    """

    def __init__(self, control: Control, orders: PromptControl, reports: Reports, directives: DirectiveSender) -> None:
        self.calls: Mapping[str, Callable[..., Any]] = {
            # What is there.
            "live": reports.live,
            "lookup": reports.lookup,
            "parts": reports.parts,
            "stats": reports.stats,
            "stored_blocks": reports.stored_blocks,
            "tenant_stats": reports.tenant_stats,
            "trie": reports.trie,
            # Tiers and devices.
            "clear": control.clear,
            "direct": control.direct,
            "move": control.move,
            "pin": control.pin,
            "unpin": control.unpin,
            # One prompt's KV.
            "compress": orders.compress,
            "compressed": orders.compressed,
            "evict_prompt": orders.evict,
            "hashes_to": orders.hashes_to,
            "pin_node": orders.pin_node,
            "would_clear": orders.would_clear,
            "would_move": orders.would_move,
            # What Serve says of its replicas.
            "drain": directives.drain,
            "scaling": reports.scaling_decided,
        }

    async def call(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Answer a call. Raises KeyError for a name that is none, and what the part raises."""
        answer = self.calls[name](*args, **options)
        return await answer if inspect.isawaitable(answer) else answer


def _no_replica(replica: str | int) -> dict[str, Any]:
    return _ended(DirectiveResult(Outcome.REFUSED_GONE), f"There is no replica {replica}.")


def _ended(ended: DirectiveResult, message: str | None = None) -> dict[str, Any]:
    message = message or _SENTENCES.get(ended.outcome)
    report = {"outcome": ended.outcome.value, "segments": ended.segments, "blocks": ended.blocks}
    return {**report, "message": message} if message else report


def _refused(reason: str, message: str) -> dict[str, Any]:
    return {"refused": reason, "message": message}
