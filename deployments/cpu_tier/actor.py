"""The CPU tier of one node: an actor that owns sealed segments in Ray's object store.

Invariants

* Ownership: the tier calls `ray.put` itself, so the objects live and die with the tier and outlive the replica that
  made them (DESIGN §7: an object dies with its owner). The push costs a second copy; a pull would need one, but Serve
  gives no way to call back into one given replica.
* Bytes: `used_bytes <= budget_bytes`, counted here. Ray never says that its store is full; spilling is not relied on.
* Publish after commit: a segment is told to the manager when its object is complete, and dropped again when the manager
  does not want it (its reservation has expired). The tier alone tells the manager what it holds.
* The tier never evicts by itself: victims are the manager's choice, because only the manager knows hotness and leases.
* Between the tier and Redis the tier's prefetch workers (`deployments.cpu_tier.prefetch_pool`) do the copying. What
they bring
  is handed on as it arrives, and kept only if the manager has granted room for it.
* A tier that neither a manager nor a replica has wanted for `TierTimes.orphan_s` ends itself: its application has been
  deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.cpu_tier.prefetch_pool import PrefetchPool, Pull
from deployments.protocol.kv_port import PrefetchGrant
from deployments.protocol.manager_client import MANAGER_ANSWER_S, ManagerClient, ManagerUnavailableError
from deployments.segment_store.codec_meter import added_up
from kvmanager.index.locations import Tier
from kvmanager.segments.format import read_header
from kvmanager.segments.forms import stated_form
from kvmanager.segments.spans import SegmentSpan

logger = logging.getLogger(__name__)

TELL_CHUNK = 1000
"""Segments in one call of a registration: the manager makes no plan while it takes them in."""
ROOM_WAIT_S = 0.25
"""For the turn of a segment as large as all that may be under way; less than a replica waits for the answer."""
PUSH_S = 20.0
"""Longest time for one batch to Redis; the manager gives a demotion up after `kv.lease_s`."""


@dataclass(frozen=True, slots=True)
class TierTimes:
    """Interval of a CPU tier's heartbeats, in seconds, and how long they go on while no replica asks for the tier."""

    heartbeat_s: float = 1.0
    first_heartbeat_s: float = 0.2
    """While prefetch workers are being started, or Redis is awaited."""
    orphan_s: float = 60.0


USUAL_TIMES = TierTimes()


class CPUTier:
    """See the module's docstring. An asyncio actor; sizes are in bytes."""

    def __init__(
        self, app_name: str, node_id: str, budget_bytes: int, prefetch_workers: int, times: TierTimes = USUAL_TIMES
    ) -> None:
        self._times = times
        self._manager = ManagerClient(app_name)
        self._redis = PrefetchPool(app_name, node_id, prefetch_workers)
        self._codecs = CodecReports()
        self._pulls: dict[bytes, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._node_id = node_id
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._segments: dict[bytes, tuple[ray.ObjectRef[Any], SegmentSpan, int]] = {}
        self._refused = 0
        self._incarnation = uuid.uuid4().hex
        self._told = False
        """Whether a manager has been told all that is here, and has answered."""
        self._wanted_at = time.monotonic()
        """Time of the last answer of a manager, or the last request of a replica of the node for a tier."""
        self._heartbeat = asyncio.get_event_loop().create_task(self._keep_registered())

    async def wanted(self) -> None:
        """A replica of the node lives: this tier does not end, though there may be no manager."""
        self._wanted_at = time.monotonic()

    async def put(self, spans: Sequence[SegmentSpan], *buffers: Any) -> int:
        """Take sealed segments (numpy uint8 arrays, parents first) and return how many were kept."""
        taken: list[SegmentSpan] = []
        for span, buffer in zip(spans, buffers, strict=True):
            if span.key not in self._segments and not self._keep(span, buffer):
                self._refused += 1
                break  # what follows could not be reached without it
            taken.append(span)
        return await self._commit(taken)

    async def fetch(self, keys: Sequence[bytes]) -> list[ray.ObjectRef[Any] | None]:
        """References to segments, None for what is not here. A reference keeps its object alive at the reader."""
        return [entry[0] if (entry := self._segments.get(key)) else None for key in keys]

    async def block_hashes(self, keys: Sequence[bytes]) -> list[bytes]:
        """The hashes of the blocks of segments, joined, as their heads have them; of what is not here none."""
        found: list[bytes] = []
        for key in keys:
            entry = self._segments.get(key)
            found.append(b"" if entry is None else read_header((await entry[0]).data).block_hashes)
        return found

    async def prefetch(
        self, replica: str, loads: Sequence[tuple[bytes, int]], late: bytes | None = None
    ) -> list[ray.ObjectRef[Any] | None]:
        """Begin to fetch segments (key, size in bytes; parents first) from Redis, for a replica that waits for them.

        Returns at once, or, where the first is as large as all that may be under way, when those before it are through:
        references to objects that will be the sealed bytes, or a reason (str) why they are not; None
        where nothing was begun. What arrives stays in this tier if the manager grants it room.

        `late` is for a replica that asks again, because this segment has not come though later ones have: what its
        worker has not brought yet is asked of other workers.
        """
        if loads:
            await self._redis.room_for(loads[0][1], ROOM_WAIT_S)
        slow = self._pulls[late].worker if late in self._pulls else None
        under_way = {
            key: pull
            for key, _ in loads
            if (pull := self._pulls.get(key)) and not pull.failed and (pull.worker is not slow or pull.answer.done())
        }
        wanted = [load for load in loads if load[0] not in self._segments and load[0] not in under_way]
        begun = self._redis.pull(wanted, avoid=slow) if wanted else []
        if slow is not None:
            self._redis.count_late(len(begun))
        if begun:
            under_way |= {pull.key: pull for pull in begun}
            self._pulls |= {pull.key: pull for pull in begun}
            task = asyncio.get_running_loop().create_task(self._keep_promoted(replica, begun))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        refs: list[ray.ObjectRef[Any] | None] = []
        for key, _ in loads:
            if entry := self._segments.get(key):
                refs.append(entry[0])
            elif key in under_way:
                refs.append(under_way[key].ref)
            else:
                break  # what follows could not be used without it
        return refs + [None] * (len(loads) - len(refs))

    async def demote(self, keys: Sequence[bytes]) -> tuple[list[int], str, dict[bytes, bytes]]:
        """Copy segments (parents first) to Redis: bytes that the first take there now, why not all ("": all), and the
        forms of those that are not dense there (`kvmanager.segments.forms`)."""
        present = list(itertools.takewhile(self._segments.__contains__, keys))
        if not present:
            return [], "not_here", {}
        return await self._redis.push(present, [self._segments[key][0] for key in present], PUSH_S)

    async def resize(self, budget_bytes: int) -> None:
        """Take another budget. What no longer fits is dropped when the tier has registered again, its next step."""
        if budget_bytes != self._budget_bytes:
            self._budget_bytes = budget_bytes
            self._incarnation = uuid.uuid4().hex

    async def evict(self, keys: Sequence[bytes]) -> int:
        """Forget segments, by the manager's order; returns the bytes freed."""
        return self._drop(keys)

    async def stats(self) -> dict[str, Any]:
        """Return the tier's own counts, to compare with the manager's books."""
        return {
            "segments": len(self._segments),
            "used_bytes": self._used_bytes,
            "budget_bytes": self._budget_bytes,
            "refused": self._refused,
            **self._redis.stats(),
            "codecs": await self._codecs.report(self._redis.ready_workers()),
        }

    def _keep(self, span: SegmentSpan, buffer: Any) -> bool:
        """Own a copy of the segment, if the budget and Ray's store have room for it."""
        if self._used_bytes + buffer.nbytes > self._budget_bytes:
            return False
        try:
            ref = ray.put(buffer)
        except ray.exceptions.RayError as error:
            logger.warning("the object store took no segment: %s", error)
            return False
        self._own(ref, span, buffer.nbytes)
        return True

    def _own(self, ref: ray.ObjectRef[Any], span: SegmentSpan, nbytes: int) -> None:
        self._segments[span.key] = (ref, span, nbytes)
        self._used_bytes += nbytes

    async def _commit(self, spans: Sequence[SegmentSpan]) -> int:
        """Tell the manager what is here now; drop what it does not want, and return how many segments stay."""
        spans = [span for span in spans if span.key in self._segments]  # a registration may have dropped some meanwhile
        if not spans:
            return 0
        wanted: list[bytes] = []
        try:
            sizes = [self._segments[span.key][2] for span in spans]
            wanted = await self._manager.ask("commit", self._node_id, spans, sizes, timeout_s=MANAGER_ANSWER_S)
        except ManagerUnavailableError as error:
            logger.warning("saved segments are dropped: %s", error)
        self._drop({span.key for span in spans} - set(wanted))
        return len(wanted)

    async def _keep_promoted(self, replica: str, pulls: Sequence[Pull]) -> None:
        """Own the segments that arrive of these pulls and those that they follow on, where the manager grants room."""
        granted, complete = PrefetchGrant(), False
        above: Sequence[Pull] = ()
        try:
            granted = await self._manager.ask(
                "prefetch", replica, self._node_id, [pull.key for pull in pulls],
                timeout_s=MANAGER_ANSWER_S, late=self._give_back,
            )  # fmt: skip
            above = self._redis.pull(granted.above) if granted.above else ()
            complete = len(above) == len(granted.above)
        except Exception as error:
            if not isinstance(error, ManagerUnavailableError):
                logger.exception("the manager was asked in vain for room")
        wanted = frozenset(granted.keys)
        kept: list[SegmentSpan] = []
        for pull in (*above, *pulls):
            sealed = None
            try:  # whatever happens to one, each of them must be awaited: it counts as on its way until then
                sealed = await self._redis.arrival(pull)
                if sealed is not None and stated_form(sealed.data):
                    sealed = None  # it is for the replica that asked for this form, not for requests of dense KV
                if complete and sealed is not None and pull.key in wanted and pull.key not in self._segments:
                    span = read_header(sealed.data).span
                    if self._used_bytes + sealed.nbytes > self._budget_bytes:
                        self._refused += 1
                        sealed = None
                    else:
                        self._own(pull.ref, span, sealed.nbytes)
                        kept.append(span)
            except Exception:
                logger.exception("a segment from Redis could not be kept")
                sealed = None
            finally:
                if self._pulls.get(pull.key) is pull:  # else it was late, and asked of another worker
                    del self._pulls[pull.key]
            complete = complete and sealed is not None
        stayed = await self._commit(kept)
        self._redis.count_promoted(stayed)
        if stayed < len(granted.keys):
            self._give_back(granted)

    def _give_back(self, granted: PrefetchGrant) -> None:
        """Tell the manager that nothing more comes into the room that it granted."""
        if granted.save_id:
            with contextlib.suppress(ManagerUnavailableError):
                self._manager.tell("abandon", granted.save_id)

    def _drop(self, keys: Collection[bytes]) -> int:
        freed = 0
        for key in keys:
            entry = self._segments.pop(key, None)
            if entry is not None:
                freed += entry[2]
        self._used_bytes -= freed
        return freed

    async def _keep_registered(self) -> None:
        """Tell the manager that this tier lives; tell a new manager everything the tier holds."""
        while time.monotonic() - self._wanted_at < self._times.orphan_s:
            try:
                known, redis = await self._manager.ask(
                    "tier_alive", self._node_id, self._incarnation, self._redis.ready, timeout_s=MANAGER_ANSWER_S
                )
                self._redis.connect(redis)
                if not (known and self._told):
                    await self._register()
                self._wanted_at = time.monotonic()
            except ManagerUnavailableError:
                pass
            except Exception:
                logger.exception("the CPU tier could not register")
            await asyncio.sleep(self._times.heartbeat_s if self._redis.settled else self._times.first_heartbeat_s)
        logger.warning("no KV manager and no replica for %s s: this CPU tier ends", self._times.orphan_s)
        ray.kill(self._address(), no_restart=True)

    async def _register(self) -> None:
        """Tell a manager all that is here, parents first, in calls that each leave it time for others in between.

        A manager that does not know this tier (any more) has kept nothing, which must drop nothing.
        """
        self._told = False
        incarnation = self._incarnation
        keys = sorted(self._segments, key=lambda key: self._segments[key][1].start_block)
        for start in range(0, max(1, len(keys)), TELL_CHUNK):
            told = start + TELL_CHUNK >= len(keys)
            here = [self._segments[key] for key in keys[start : start + TELL_CHUNK] if key in self._segments]
            spans, sizes = [span for _, span, _ in here], [size for _, _, size in here]
            if start:
                call: tuple[Any, ...] = ("adopt_tier", self._node_id, incarnation, spans, sizes, told)
            else:
                hello = (self._address(), incarnation, self._budget_bytes)
                call = ("register_tier", self._node_id, *hello, spans, sizes, told)
            wanted = await self._manager.ask(*call, timeout_s=MANAGER_ANSWER_S)
            if wanted is None:
                return
            self._drop({span.key for span in spans} - set(wanted))
            if gone := [key for key in wanted if key not in self._segments]:  # dropped while the call was under way
                await self._manager.ask("lost", Tier.CPU.value, self._node_id, gone, timeout_s=MANAGER_ANSWER_S)
        self._told = True

    def _address(self) -> Any:
        return ray.get_runtime_context().current_actor


def tier_name(app_name: str, node_id: str) -> str:
    """The Ray actor name of a node's tier."""
    return f"crosskv::{app_name}::cpu_tier::{node_id}"


def get_or_start_tier(
    app_name: str, node_id: str, budget_bytes: int, prefetch_workers: int = 0, times: TierTimes = USUAL_TIMES
) -> Any:
    """The node's CPU tier, started on that node if it is not running. Safe to call from every replica of the node.

    A tier that runs already, from before a change of the settings, takes the new budget.
    """
    options: dict[str, Any] = {
        "name": tier_name(app_name, node_id),
        "namespace": "serve",
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    }
    tier: Any = ray.remote(CPUTier).options(**options).remote(app_name, node_id, budget_bytes, prefetch_workers, times)
    tier.resize.remote(budget_bytes)
    return tier


ANSWER_S = 0.5
"""Metrics are waited for at the ingress; a worker that does not answer in time counts as it was last."""


class CodecReports:
    """The last report of each worker that there ever was. On the tier's event loop."""

    def __init__(self) -> None:
        self._last: dict[Any, dict[str, dict[str, Any]]] = {}
        self._ended: dict[str, dict[str, Any]] = {}

    async def report(self, workers: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Ask these workers, the present ones, and add up what all have said. See `CodecMeter.report`."""
        answers = await asyncio.gather(*map(_asked, workers))
        self._last |= {worker: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}
        for worker in self._last.keys() - set(workers):
            self._ended = added_up([self._ended, self._last.pop(worker)])
        return added_up([self._ended, *self._last.values()])


async def _asked(worker: Any) -> dict[str, dict[str, Any]] | None:
    try:
        answer: dict[str, dict[str, Any]] = await asyncio.wait_for(worker.codec_report.remote(), ANSWER_S)
    except (TimeoutError, ray.exceptions.RayError):
        return None
    return answer
