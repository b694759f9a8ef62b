"""The connector's port (`deployments.protocol.kv_port.KVPort`) over Ray: the manager actor and the node's CPU tier.

Errors become "nothing" here, are counted in `counters`, and are logged once per kind and outage.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from configs.kv_section import KVSettings
from deployments.cpu_tier.actor import get_or_start_tier, tier_name
from deployments.port.calls import LockedBreaker, PortWaits, SecondPlans
from deployments.port.tier_reader import TierReader
from deployments.protocol.kv_port import LayerArrival, OfferedBlocks, SaveGrant, in_layer_groups
from deployments.protocol.manager_client import SERVE_NAMESPACE, ManagerClient, ManagerUnavailableError
from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import ExtensionSample, LateSample, Sample
from kvmanager.moves.plan import Plan, PlannedLoad, PlanQuery
from kvmanager.segments.spans import SegmentSpan

logger = logging.getLogger(__name__)

LATE_SHARE = 0.9
"""A segment that did not come after this part of the time that it had is late; otherwise it is missing."""
OFFER_DEADLINE_S = 1.0
"""A save holds its device blocks until its offer is answered."""
REPORT_EVERY_S = 0.02
"""Longest wait of a step's reports for those of the next steps, to travel together: a call costs the manager more than
its content. Prompts that share a prefix take longer to compute it than routers now wait to hear of it."""


class ClusterPort:
    """See `KVPort` for the threads that may call each method."""

    def __init__(
        self,
        app_name: str,
        replica: str,
        node_id: str,
        settings: KVSettings,
        manager: ManagerClient,
        starts_tier: bool = True,
    ) -> None:
        """`starts_tier`: whether it starts the node's CPU tier, or only finds it."""
        self.manager = manager
        self._starts_tier = starts_tier
        self.counters: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self.waits = PortWaits()
        self._plan_circuit = LockedBreaker()
        self._save_circuit = LockedBreaker()
        self._app_name = app_name
        self._replica = replica
        self._node_id = node_id
        self._settings = settings
        self._own_tier: Any = None
        self._needs_resync = False
        self._late_s = {Tier.CPU.value: settings.tier_deadline_s, Tier.REDIS.value: settings.redis_deadline_s}
        longest_wait_s = {
            Tier.CPU.value: settings.tier_deadline_s,
            Tier.REDIS.value: settings.tier_deadline_s + settings.redis_deadline_s,
        }
        self._reader = TierReader(app_name, replica, node_id, self.count, self._report_load, self.waits, longest_wait_s)
        self._second_plans = SecondPlans()
        self._reports: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        """Set when a caller waits for a report, or may use what it takes back."""
        self._reporter = threading.Thread(target=self._report, name="crosskv-report", daemon=True)
        self._reporter.start()
        if settings.cpu_tier_bytes:
            self._start_tier()

    async def plan(self, query: PlanQuery) -> Plan | None:
        """The manager's plan for a prompt, also if there is nothing to load; None without an answer. On a loop."""
        if not self._plan_circuit.allows(time.monotonic()):
            self.count("plan_not_asked")
            return None
        began = time.monotonic()
        try:
            answer: Plan | None = await self.manager.ask(
                "plan", self._replica, self._node_id, query,
                timeout_s=self._settings.plan_deadline_s, late=self._plan_not_awaited,
            )  # fmt: skip
        except ManagerUnavailableError:
            self._plan_circuit.failed(time.monotonic())
            self.count("plan_unanswered")
            return None
        except BaseException:
            self._plan_circuit.abandoned()  # the client has gone, or something is wrong here
            raise
        finally:
            self.waits.plan.observe(time.monotonic() - began)
        self._plan_circuit.succeeded()
        return answer

    def _plan_not_awaited(self, plan: Plan | None) -> None:
        if plan is not None:  # else its lease would keep KV from being cleared, evicted and stored again until it ends
            self.release(plan.lease_id)

    def _grant_not_awaited(self, answer: tuple[int, Sequence[SegmentSpan]] | None) -> None:
        if answer:
            self._reports.put(("abandon", answer[0]))

    def plan_again(self, query: PlanQuery, on_plan: Callable[[Plan | None], None]) -> None:
        """See `KVPort`."""
        self._second_plans.ask(self.plan(query), on_plan)

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `deployments.port.tier_reader`. A load that is given up is reported here: nothing else measures it."""
        began = asked = time.monotonic()
        asked_bytes = 0
        for load, sealed in zip(loads, self._reader.read(loads, deadline), strict=False):
            asked_bytes += load.read_bytes(load.used_blocks or load.num_blocks)
            if sealed is None:
                now = time.monotonic()
                if now - asked >= LATE_SHARE * min(self._late_s[load.tier], deadline - asked):
                    self._reports.put(("rate", ("late", load.tier, asked_bytes, now - began)))
            yield sealed
            asked = time.monotonic()

    def brings_layers(self, tier: str) -> bool:
        """The CPU tiers' segments lie in shared memory; what Redis has comes segment by segment."""
        return tier == Tier.CPU.value

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        """Ray keeps an object in its place as long as something refers to it."""
        return in_layer_groups(self.fetch(loads, deadline), group_ends)

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        """One call to the manager. One circuit breaker guards it and the `store` that follows a grant."""
        if self._own_tier is None and not self._starts_tier:
            self._start_tier()
        if self._own_tier is None:
            return None
        if not self._save_circuit.allows(time.monotonic()):
            self.count("offer_not_asked")
            return None
        try:
            answer = self.manager.ask_blocking(
                "offer", self._replica, self._node_id, offered, list(segment_bytes),
                timeout_s=min(OFFER_DEADLINE_S, self._settings.lease_s), late=self._grant_not_awaited,
            )  # fmt: skip
        except ManagerUnavailableError:
            self._save_circuit.failed(time.monotonic())
            self.count("offer_unanswered")
            return None
        except BaseException:
            self._save_circuit.abandoned()
            raise
        if not answer:
            self._save_circuit.abandoned()  # says nothing of the tier
            return None
        return SaveGrant(answer[0], tuple(answer[1]))

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """One call to the tier with all segments; what the tier did not take is given up."""
        kept = 0
        if not segments:
            self._save_circuit.abandoned()
        else:
            try:
                kept = ray.get(
                    self._own_tier.put.remote([span for span, _ in segments], *(buffer for _, buffer in segments)),
                    timeout=self._settings.lease_s,
                )
                self._save_circuit.succeeded()
            except ray.exceptions.RayActorError:
                self._save_circuit.failed(time.monotonic())
                self.count("store_tier_gone")
                self._start_tier()
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                self._save_circuit.failed(time.monotonic())
                self.count("store_failed")
        if kept < len(grant.spans):
            self.count("segments_not_stored", len(grant.spans) - kept)
            self._reports.put(("abandon", grant.save_id))
            self._urgent.set()
        return kept

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        """The manager forgets the segment, and the tier too."""
        self.count(f"mismatch_{reason}")
        self._reports.put(("bad_segment", load))
        self._urgent.set()

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        """Queued; sent by the report thread in order."""
        self._reports.put(("placement", (stored, removed, cleared)))

    def report_rate(self, sample: Sample | LateSample | ExtensionSample) -> None:
        """Queued."""
        self._reports.put(("rate", sample))

    def release(self, lease_id: int) -> None:
        """Queued; a lost release ends with the lease."""
        if lease_id:
            self._reports.put(("release", lease_id))

    def flush(self, timeout_s: float = 1.0) -> None:
        """Return when everything queued before this call has been sent; at the latest after `timeout_s`."""
        sent = threading.Event()
        self._reports.put(("flush", sent))
        self._urgent.set()
        sent.wait(timeout_s)

    def report_registration(self, arguments: Sequence[Any], sent: Future[None]) -> None:
        """Queue a call of `register_replica`; `sent` says when it has gone, or why it has not.

        On the engine thread, right after it has read what the device holds: so the changes that the manager hears after
        it are those that happened after it.
        """
        self._needs_resync = False
        self._reports.put(("register", (arguments, sent)))
        self._urgent.set()

    @property
    def needs_resync(self) -> bool:
        """Whether the manager was not told of some change of the device, so that the replica must register again."""
        return self._needs_resync

    def look_after_tier(self) -> None:
        """Start the node's CPU tier if it has ended, and else tell it that it is wanted. Blocks: for a thread.

        A tier that has ended took its segments along, but without one nothing is saved, or loaded from Redis.
        """
        if not self._settings.cpu_tier_bytes:
            return
        try:
            tier = ray.get_actor(tier_name(self._app_name, self._node_id), namespace=SERVE_NAMESPACE)
        except ValueError:
            if self._starts_tier:
                self.count("tier_started_again")
                self._start_tier()
        else:
            self._own_tier = tier
            tier.wanted.remote()

    def close(self) -> None:
        """Send what is queued and end the report thread."""
        self._second_plans.close()
        self._reports.put(None)
        self._urgent.set()
        self._reporter.join(2.0)

    def circuits(self) -> dict[tuple[str, str], str]:
        """The state of each circuit breaker, by part and node: the manager's plans, saves, and the CPU tiers."""
        tiers = {(Tier.CPU.value, node): state for node, state in self._reader.circuits().items()}
        own = {("manager", ""): self._plan_circuit.state.value, ("saves", ""): self._save_circuit.state.value}
        return {**own, **tiers}

    def _start_tier(self) -> None:
        """Or find it; without one nothing is offered."""
        if not self._starts_tier:
            with contextlib.suppress(ValueError):
                self._own_tier = ray.get_actor(tier_name(self._app_name, self._node_id), namespace=SERVE_NAMESPACE)
            return
        workers = self._settings.prefetch_workers if self._settings.redis_url else 0
        self._own_tier = get_or_start_tier(self._app_name, self._node_id, int(self._settings.cpu_tier_bytes), workers)

    def _report_load(self, what: str, load: PlannedLoad) -> None:
        self._reports.put((what, load))
        self._urgent.set()

    def _report(self) -> None:
        """The report thread: join what waits into as few calls as keep its order."""
        while (item := self._reports.get()) is not None:
            self._urgent.wait(REPORT_EVERY_S)
            self._urgent.clear()
            items = [item]
            while not self._reports.empty():
                following = self._reports.get_nowait()
                if following is None:
                    self._send(items)
                    return
                items.append(following)
            self._send(items)

    def _send(self, items: list[tuple[str, Any]]) -> None:
        """Send what was reported; a registration by itself, between what came before and after it."""
        before: list[tuple[str, Any]] = []
        for kind, value in items:
            if kind != "register":
                before.append((kind, value))
                continue
            self._send_together(before)
            before = []
            arguments, sent = value
            if not sent.set_running_or_notify_cancel():
                continue  # its caller no longer waits, and it will be asked for again
            try:
                self.manager.tell("register_replica", *arguments)
            except Exception as error:
                self._needs_resync = True
                sent.set_exception(error)
            else:
                sent.set_result(None)
        self._send_together(before)

    def _send_together(self, items: list[tuple[str, Any]]) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []
        if changes := [value for kind, value in items if kind == "placement"]:
            calls.append(("report_placement", (self._replica, changes)))
        if samples := [value for kind, value in items if kind == "rate"]:
            calls.append(("report_rates", (self._replica, samples)))
        if leases := [value for kind, value in items if kind == "release"]:
            calls.append(("release", (leases,)))
        calls += [("abandon", (value,)) for kind, value in items if kind == "abandon"]
        try:
            if calls:
                self.manager.tell_together(calls)
            for kind, value in items:
                if kind == "bad_segment":
                    self.manager.tell("bad_segment", value.tier, value.holder, value.key)
                elif kind == "lost":
                    self.manager.tell("lost", value.tier, value.holder, [value.key])
        except ManagerUnavailableError:
            self.count("reports_lost", sum(kind != "flush" for kind, _ in items))
            self._needs_resync = self._needs_resync or any(kind == "placement" for kind, _ in items)
        except Exception:
            logger.exception("a report to the KV manager failed")
        finally:
            for kind, value in items:
                if kind == "flush":
                    value.set()

    def count(self, what: str, amount: int = 1) -> None:
        """Count a degradation, and log its first."""
        with self._lock:
            first = what not in self.counters
            self.counters[what] += amount
        if first:
            logger.warning("KV reuse is degraded: %s (counted from now on, logged once)", what)


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Have Python's random numbers be no other process's meanwhile.

    vLLM seeds them alike in every engine's process, and Ray draws from them the name under which a driver hears of its
    cluster's errors. Ray's GCS lets one of two with equal names wait: they would take that place from each other a
    thousand times a second, as long as both live (`tests/deployments/port/test_open_there.py`).
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


@dataclass(frozen=True)
class OpenThere:
    """A second port of a replica, in a process that the replica started: it joins the cluster by itself.

    Such a process is a driver to Ray, with a job of its own. So it starts no actors: they would have that job's
    environment and not the replica's. The credentials that the cluster asks for are in the environment, which processes
    inherit. Call it in the other process, once. Can be pickled.
    """

    gcs_address: str
    app_name: str
    replica: str
    node_id: str
    settings: KVSettings

    def __call__(self) -> ClusterPort:
        """Join, and open the port."""
        with _own_numbers():
            ray.init(address=self.gcs_address, namespace=SERVE_NAMESPACE, log_to_driver=False, configure_logging=False)
        joined = ray.get_runtime_context().get_node_id()
        if joined != self.node_id:  # two nodes on one machine: segments of this node's tier are copied to that one
            logger.warning("the engine's process has joined node %s, its replica is on %s", joined, self.node_id)
        manager = ManagerClient(self.app_name)
        return _PortThere(self.app_name, self.replica, self.node_id, self.settings, manager, starts_tier=False)


class _PortThere(ClusterPort):
    """Closing it leaves the cluster."""

    def close(self) -> None:
        """See `ClusterPort`."""
        super().close()
        ray.shutdown()
