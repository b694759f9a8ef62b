"""The Redis tier: one actor per deployment that owns everything about Redis except the bytes' way.

What it does, over and over, from `_run`:

1. embedded: start the server, again if it has died
2. connect, and check that this Redis can be used
3. external: claim the namespace for this model, so that no two deployments manage the same segments
4. tell the manager of a new life of Redis and of all segments there, parents first; delete what it does not want
5. watch, until Redis fails, is another one than before, or the manager is: then from 1 on again

Invariants

* The manager knows nothing of Redis but what step 4 of the present life told it and what it has had written since.
  Each life has an `incarnation` of its own.
* Parallel to the loop a heartbeat brings the state ("ok", or one sentence for /health) to the manager, and back from it
  the model's fingerprint, which the first replica brings.
* Nothing that Redis does ends this actor, and no command of Redis runs on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import ray
import redis
from ray import serve

from deployments.manager.tier_registry import OK, WAITS
from deployments.protocol.manager_client import MANAGER_ANSWER_S, ManagerClient, ManagerUnavailableError
from deployments.redis_tier.access import RedisAccess
from deployments.redis_tier.config import USUAL_TIMES, RedisTierConfig, RedisTimes, check_now
from deployments.segment_store.base import StoreUnavailableError
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_files import find_profile
from deployments.segment_store.endpoint import RedisEndpoint, open_profiles, open_store
from deployments.segment_store.redis_connection import RedisLoadingError, RedisUnavailableError, ServerFacts
from deployments.segment_store.redis_store import RedisStore
from deployments.segment_store.stored_form import stored_form
from kvmanager.segments.format import SegmentHeader
from kvmanager.segments.forms import DENSE
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.server_secret import ServerSecret

__all__ = ["RedisTier", "RedisTierConfig", "RedisTimes", "check_now"]

logger = logging.getLogger(__name__)

SERVER_ENDED = "the embedded Redis has ended and is started again"
FAILURES_TO_LOSE = 3
ADOPT_CHUNK = 1000
INDEX_DEADLINE_S = 2.0
"""Least timeout for the answers that the index needs: they are no request's, and starting over costs more."""


class RedisTier:
    """See the module's docstring. An asyncio actor."""

    def __init__(self, config: RedisTierConfig, secret: ServerSecret, times: RedisTimes = USUAL_TIMES) -> None:
        self._config = config
        self._times = times
        self._secret = secret
        self._manager = ManagerClient(config.app_name or serve.get_deployment_actor_context().app_name)
        self._access = RedisAccess(config)
        self._state = "Redis is starting"
        self._incarnation = uuid.uuid4().hex
        self._registered = False
        self._fingerprint: bytes | None = None
        self._fingerprint_known = asyncio.Event()
        self._start_over = asyncio.Event()
        self._retry_s = times.retry_s
        self._store: CheckedStore | None = None
        self._transport: RedisStore | None = None
        self._facts: ServerFacts | None = None
        self._budget_bytes = config.budget_bytes
        self._unusable = 0
        self._neighbours_gone = 0
        self._deletions: set[asyncio.Task[int]] = set()
        """Threads that delete segments now."""
        loop = asyncio.get_event_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._keep_alive())]

    async def evict(self, keys: Sequence[bytes]) -> int:
        """Delete segments, by the manager's order; returns how many there were. Raises when Redis does not do it."""
        if self._store is None:
            raise RedisUnavailableError(self._state)
        deletion = asyncio.get_running_loop().create_task(asyncio.to_thread(self._store.delete, list(keys)))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)
        return await asyncio.shield(deletion)  # the thread goes on, whatever becomes of the caller

    async def renew(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keep segments from expiring, by the manager's order: children first; returns those that are not there.

        Raises when Redis does not do it.
        """
        if self._transport is None:
            raise RedisUnavailableError(self._state)
        return await asyncio.to_thread(self._transport.renew, list(keys))

    async def stats(self) -> dict[str, Any]:
        """Return Redis's last report of itself, without asking it."""
        facts = self._facts
        return {
            "state": self._state,
            "budget_bytes": self._budget_bytes,
            "unusable": self._unusable,
            "neighbours": self._access.neighbour_segments,
            "neighbours_gone": self._neighbours_gone,
            "version": facts.version if facts else None,
            "used_memory_bytes": facts.used_memory_bytes if facts else 0,
            "maxmemory_bytes": facts.maxmemory_bytes if facts else 0,
            "evicted_keys": facts.evicted_keys if facts else 0,
            "clients": facts.clients if facts else 0,
        }

    async def close(self) -> None:
        """A clean end: the claim is given up, the embedded server stopped. What is stored stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._access.close)

    async def _run(self) -> None:
        """The loop of the module's docstring."""
        while True:
            try:
                await self._live()
                await asyncio.sleep(self._times.first_heartbeat_s)
                continue
            except RedisLoadingError as error:
                await self._lose(str(error), by_itself=True)
                self._retry_s = self._times.retry_s
            except (RedisUnavailableError, StoreUnavailableError, ValueError) as error:
                await self._lose(str(error))
            except ManagerUnavailableError as error:
                await self._lose(f"the segments in Redis are not registered: {error}")
            except Exception as error:
                logger.exception("the Redis tier failed")
                await self._lose(f"the Redis tier failed: {type(error).__name__}")
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, self._times.longest_retry_s)

    async def _live(self) -> None:
        """One life of Redis; returns when a new one is to be told at once, raises when Redis or the manager fails."""
        facts = await asyncio.to_thread(self._access.open)
        self._take_facts(facts)
        if self._fingerprint is None:
            self._state = WAITS
            await self._fingerprint_known.wait()
        fingerprint = self._fingerprint
        assert fingerprint is not None
        await asyncio.to_thread(self._access.claim, fingerprint)
        profile = await asyncio.to_thread(find_profile, self._config.profiles_folder, self._config.model)
        digest = profile.digest if profile else b""
        endpoint = self._config.endpoint(self._access.url, fingerprint, self._secret, digest)
        profiles = open_profiles(endpoint)
        keep_profiles = [profiles.renew_all]
        if profile is not None:
            keep_profiles.append(partial(profiles.keep, profile.digest, profile.content))
        deleted = await asyncio.to_thread(self._access.look_at_neighbours, endpoint.prefix)
        if neighbours := self._access.neighbour_segments:
            logger.info("Redis keeps %d segments of other models while there is room", neighbours)
        if deleted:
            logger.warning("%d entries of this server's own Redis belonged to no segment; they are deleted", deleted)
        self._start_over.clear()
        index = asyncio.get_running_loop().create_task(self._index(endpoint))
        try:
            await self._watch(facts.run_id, index, keep_profiles)
        finally:
            index.cancel()
            await asyncio.gather(index, return_exceptions=True)

    async def _index(self, endpoint: RedisEndpoint) -> None:
        """Tell the manager of this life and of all that Redis holds."""
        self._state = "Redis is being indexed"
        self._incarnation = incarnation = uuid.uuid4().hex
        self._registered = True  # from the asking on: an answer that does not come leaves open whether it was heard
        await self._ask("register_redis", self._address(), incarnation, endpoint, self._budget_bytes)
        self._store = open_store(endpoint)
        self._transport = RedisStore(endpoint.url, endpoint.prefix, endpoint.deadline_s, endpoint.expire_s)
        patient = replace(endpoint, deadline_s=max(INDEX_DEADLINE_S, endpoint.deadline_s))
        while self._deletions:  # of the life before: what is about to go must not be found
            await asyncio.wait(set(self._deletions))
        found = await asyncio.to_thread(read_index, patient)
        self._unusable += len(found.unusable)
        headers, unwanted = found.headers, list(found.unusable)
        for start in range(0, len(headers), ADOPT_CHUNK):
            self._state = f"indexing {start} of {len(headers)} segments in Redis"
            chunk = headers[start : start + ADOPT_CHUNK]
            kept = set(
                await self._ask(
                    "adopt_redis",
                    incarnation,
                    [header.span for header in chunk],
                    [header.sealed_bytes for header in chunk],
                    [header.raw_sealed_bytes for header in chunk],
                    {key: form for key in map(attrgetter("key"), chunk) if (form := found.forms.get(key))},
                )
            )
            unwanted += [header.key for header in chunk if header.key not in kept]
        # A manager that was recreated meanwhile keeps nothing of a life it does not know: that must delete nothing.
        if not (await self._ask("redis_alive", incarnation, self._state))["known"]:
            self._start_over.set()
            return
        await asyncio.to_thread(open_store(patient).delete, unwanted)
        await self._ask("redis_indexed", incarnation)
        self._retry_s = self._times.retry_s
        self._state = OK
        logger.info(
            "Redis: %d segments found; deleted: %d that the manager did not keep, %d unusable",
            len(headers),
            len(unwanted) - len(found.unusable),
            len(found.unusable),
        )

    async def _watch(self, run_id: str, index: asyncio.Task[None], keep_profiles: Sequence[Callable[[], None]]) -> None:
        """Return when a new life is to be told; raise when Redis is lost or could not be indexed."""
        failures, renewed = 0, -self._times.profile_renewal_s
        while True:
            if time.monotonic() - renewed > self._times.profile_renewal_s:
                for keep in keep_profiles:
                    await asyncio.to_thread(keep)
                renewed = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._start_over.wait(), self._times.probe_every_s)
            if index.done():
                index.result()
            if self._start_over.is_set():
                return
            if self._access.server_ended:
                raise RedisUnavailableError(SERVER_ENDED)
            try:
                facts = await asyncio.to_thread(self._access.probe)
            except redis.RedisError as error:
                failures += 1
                if failures >= FAILURES_TO_LOSE:
                    raise RedisUnavailableError(self._access.explain(error)) from error
                continue
            failures = 0
            self._take_facts(facts)
            self._neighbours_gone += await self._make_room(facts)
            if facts.run_id != run_id:
                logger.warning("another Redis answers at the same place: what it holds is indexed again")
                return

    async def _make_room(self, facts: ServerFacts) -> int:
        """Let segments of other models leave when they are in the way; returns how many did."""
        try:
            gone = await asyncio.to_thread(self._access.make_room, facts)
        except redis.RedisError as error:
            logger.warning("other models' segments were not deleted: %s", self._access.explain(error))
            return 0
        if gone:
            logger.info("%d segments of other models left Redis to make room", gone)
        return gone

    def _take_facts(self, facts: ServerFacts) -> None:
        self._facts = facts
        budget = self._config.budget_below(facts.maxmemory_bytes)
        if budget != self._budget_bytes:
            logger.warning(
                "Redis' own maxmemory is %d: its next registration is for %d bytes of segments, of the %d in "
                "kv.redis_bytes",
                facts.maxmemory_bytes,
                budget,
                self._config.budget_bytes,
            )
        self._budget_bytes = budget

    async def _lose(self, state: str, by_itself: bool = False) -> None:
        """Redis cannot be used, or is not known to the manager: stop plans from there."""
        if state != self._state and not by_itself:
            logger.warning("%s", state)
        self._state = state
        self._store = self._transport = None
        if self._registered:
            self._registered = False
            with contextlib.suppress(ManagerUnavailableError):
                await self._ask("redis_lost", self._incarnation, state)

    async def _keep_alive(self) -> None:
        """The heartbeat."""
        while True:
            incarnation, registered = self._incarnation, self._registered
            try:
                answer = await self._ask("redis_alive", incarnation, self._state)
                unknown = registered and not answer["known"] and incarnation == self._incarnation
                if unknown or (registered and answer["fingerprint"] != self._fingerprint):
                    self._start_over.set()
                self._fingerprint = answer["fingerprint"]
                if self._fingerprint is None:
                    self._fingerprint_known.clear()
                else:
                    self._fingerprint_known.set()
            except ManagerUnavailableError:
                pass
            except Exception:
                logger.exception("the Redis tier's heartbeat failed")
            times = self._times
            await asyncio.sleep(times.first_heartbeat_s if self._fingerprint is None else times.heartbeat_s)

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._manager.ask(method, *args, timeout_s=MANAGER_ANSWER_S)

    def _address(self) -> Any:
        return ray.get_runtime_context().current_actor


# What lies in Redis, read again for each of its lives: the headers, not the payloads.


@dataclass(frozen=True, slots=True)
class RedisIndex:
    """`headers` are ordered by start block, so parents come first."""

    headers: list[SegmentHeader]
    unusable: list[bytes]
    forms: dict[SegmentKey, bytes]
    """Of those that are not dense (`kvmanager.segments.forms`)."""


def read_index(endpoint: RedisEndpoint) -> RedisIndex:
    """Scan Redis; blocks for as long as that takes. Raises StoreUnavailableError.

    A segment that is not dense is unusable where the settings or the model's own have become others: no replica
    presents it, and it would keep what is dense from being copied there.
    """
    made = stored_form(endpoint.coding, endpoint.fingerprint)
    headers: list[SegmentHeader] = []
    unusable: list[bytes] = []
    forms: dict[SegmentKey, bytes] = {}
    for chunk in open_store(endpoint).scan():
        unusable += chunk.unusable
        forms |= chunk.forms
        for header in chunk.headers:
            form = chunk.forms.get(SegmentKey(header.key), DENSE)
            if form == DENSE or (made is not None and made.serves(header, form)):
                headers.append(header)
            else:
                unusable.append(header.key)
    headers.sort(key=lambda header: header.start_block)
    return RedisIndex(headers, unusable, forms)
