"""Preemption that keeps KV: what a request has computed is saved before its blocks go, and found when it comes back.

vLLM frees a preempted request's blocks and tells no connector. They stay on the device while no request needs them;
what is overwritten has to come from a tier. So, for each preemption:

    before        its full blocks are saved, the answer's too (at most block - 1 tokens are lost), and scored as used
    held          blocks of that save are free when they have been copied: vLLM preempts no other request meanwhile
    ahead         while it is among the next in the queue, what the device lacks is brought there, if it has room back
    what the device still lacks is planned again over prompt and answer, asynchronously, once a
                  preemption; until the plan is there, or `PLAN_WITHIN_S` is over, vLLM asks again

The plan that it arrived with is of no use: its lease was given back, and it knows nothing of what was saved since.
A request of which another path keeps a state has rules of its own, and is not saved here. On the engine thread, but
answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from prometheus_client.core import CounterMetricFamily, Metric

from deployments.engine.load_paths.base import WAIT, Ask, LoadPath
from deployments.engine.pool.control import Onboarding, PoolControl
from deployments.protocol.kv_port import KVPort
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.segments.keys import BlockHash

if TYPE_CHECKING:
    from deployments.engine.load_paths.parts import EngineParts
    from deployments.engine.request_saves import DenseSaves
    from deployments.engine.tracked_request import TrackedRequest

PLAN_WITHIN_S = 1.0
"""No request waits longer for its plan; the port has a deadline of its own."""
STORED_WITHIN_S = 1.0
"""How long a request that is back waits until what it saved can be planned."""
HELD_WITHIN_S = 1.0
"""How long a save may keep vLLM from preempting another request."""
AHEAD_WITHIN_S = 2.0


@dataclass(slots=True, eq=False)
class Preemption:
    """The last preemption of a request, until it runs again."""

    blocks: int
    """Full ones that it had computed."""
    saving: bool = False
    save_until: float = 0.0
    asked_at: float | None = None
    plan: Plan | None = None
    answered: bool = False
    over: bool = False
    """A plan that comes now is given back."""
    brings: bool = False
    """Something is being brought ahead, or has been: once."""


class PreemptedKV(LoadPath):
    """See the module's docstring. `on_engine_thread` runs a function between two steps; from any thread."""

    needs_state = True

    def __init__(
        self,
        port: KVPort,
        saves: DenseSaves,
        block_size: int,
        on_engine_thread: Callable[[Callable[[], None]], Any],
        score: Callable[[TrackedRequest], None],
        control: PoolControl,
        clock: Callable[[], float] = time.monotonic,
        needs_landing: bool = False,
    ) -> None:
        """`score` tells the pool how hot the blocks of a running request are; `control` brings KV ahead.

        `needs_landing`: see `PlanQuery`.
        """
        self.port = port
        self.saves = saves
        self.block_size = block_size
        self.on_engine_thread = on_engine_thread
        self.score = score
        self.control = control
        self.clock = clock
        self.needs_landing = needs_landing
        self.brought_ahead = 0
        """Blocks."""
        self._held: dict[Preemption, float] = {}

    # Where it is a load path.

    def propose(self, request: TrackedRequest, first_block: int) -> Ask:
        """Wait for the plan that it has asked for; then the paths behind this one load by it."""
        return WAIT if self.awaits(request, first_block * self.block_size) else None

    def admitted(self, request: TrackedRequest) -> None:
        """It runs again."""
        self.end(request)

    def left(self, request: TrackedRequest) -> None:
        """See `LoadPath`."""
        self.end(request)

    def families(self) -> Iterable[Metric]:
        """See `LoadPath`."""
        return (brought_ahead_family(self.brought_ahead),)

    # What the scheduler asks of it (`deployments.engine.scheduling`).

    @property
    def holds_blocks(self) -> bool:
        """Whether a preemption's save is about to free blocks."""
        now = self.clock()
        for preemption in [each for each, until in self._held.items() if until <= now]:
            del self._held[preemption]
        return bool(self._held)

    def before(self, tracked: TrackedRequest) -> None:
        """A running request is about to lose its blocks: save what is in them."""
        self.end(tracked)
        if tracked.is_loading or tracked.state:
            return
        now = self.clock()
        preemption = Preemption(tracked.request.num_computed_tokens // self.block_size)
        preemption.save_until = now + STORED_WITHIN_S

        def stored(segments: int | None) -> None:
            preemption.saving = False

        def freed() -> None:
            self._held.pop(preemption, None)

        before = tracked.saving.blocks
        preemption.saving = True
        self.saves.save(tracked, preemption.blocks, on_stored=stored, on_freed=freed)
        if tracked.saving.blocks > before:
            self._held[preemption] = now + HELD_WITHIN_S
        else:
            preemption.saving = False
        self.score(tracked)
        self.port.release(tracked.plan.lease_id)
        tracked.preempted()
        tracked.state[self] = preemption

    def awaits(self, tracked: TrackedRequest, device_tokens: int) -> bool:
        """Whether a request that would run with `device_tokens` on the device waits for its plan. Asks for it."""
        preemption = self._of(tracked)
        if preemption is None or preemption.over:
            return False
        if device_tokens // self.block_size >= preemption.blocks:
            return False  # all is here; a plan is asked for when some of it goes
        now = self.clock()
        if preemption.saving and now < preemption.save_until:
            return True
        if preemption.asked_at is None:
            self._ask(tracked, preemption, now)
        if preemption.answered:
            self._take(tracked, preemption)
            return False
        if now - (preemption.asked_at or now) < PLAN_WITHIN_S:
            return True
        preemption.over = True
        return False

    def holds_back(self, tracked: TrackedRequest) -> bool:
        """Whether it could not run now, if it were its turn."""
        preemption = self._of(tracked)
        if preemption is None or preemption.over or preemption.answered:
            return False
        now = self.clock()
        if preemption.asked_at is not None:
            return now - preemption.asked_at < PLAN_WITHIN_S
        return preemption.saving and now < preemption.save_until

    def ahead(self, tracked: TrackedRequest) -> None:
        """It is among the next: bring what the device lacks of it, if there is room that something colder has."""
        preemption, control = self._of(tracked), self.control
        if preemption is None or preemption.brings or preemption.over or preemption.saving:
            return
        hashes = tracked.request.block_hashes[: preemption.blocks]
        first = next((at for at, name in enumerate(hashes) if not control.has(name)), len(hashes))
        if first >= preemption.blocks:
            return
        if preemption.asked_at is None:
            self._ask(tracked, preemption, self.clock())
        plan = preemption.plan
        if not preemption.answered:
            return
        preemption.brings = True
        end = max((load.end_block for load in plan.segments), default=0) if plan else 0
        if plan is None or end <= first or not control.hear(plan.epoch, plan.now):
            return
        onboarding = Onboarding(
            hashes=hashes[:end],
            loads=plan.segments,
            scores=[plan.now] * end,
            deadline=self.clock() + AHEAD_WITHIN_S,
            owner=tracked.owner,
        )
        done = control.onboard(onboarding, first)
        if done is not None:
            done.add_done_callback(lambda future: self._count(first, future))

    def end(self, tracked: TrackedRequest) -> None:
        """It runs again, or has ended."""
        preemption: Preemption | None = tracked.state.pop(self, None)
        if preemption is not None:
            preemption.over = True
            if preemption.plan is not None and tracked.plan.lease_id != preemption.plan.lease_id:
                self.port.release(preemption.plan.lease_id)

    def _of(self, tracked: TrackedRequest) -> Preemption | None:
        return tracked.state.get(self)

    def _ask(self, tracked: TrackedRequest, preemption: Preemption, now: float) -> None:
        preemption.asked_at = now

        def answer(plan: Plan | None) -> None:
            def take() -> None:
                preemption.plan, preemption.answered = plan, True
                if preemption.over and plan is not None:
                    preemption.plan = None
                    self.port.release(plan.lease_id)

            self.on_engine_thread(take)

        hashes = cast("list[BlockHash]", tracked.request.block_hashes[: preemption.blocks])
        query = PlanQuery(hashes, prompt_tokens=tracked.request.num_tokens, needs_landing=self.needs_landing)
        self.port.plan_again(query, answer)

    def _take(self, tracked: TrackedRequest, preemption: Preemption) -> None:
        """Load by the plan; once, for a load that failed must not be tried for ever."""
        preemption.over = True
        plan, preemption.plan = preemption.plan, None
        if plan is not None:
            tracked.plan.become(plan.segments, plan.lease_id)

    def _count(self, first: int, future: Any) -> None:
        if not future.cancelled() and future.exception() is None:
            self.brought_ahead += future.result() - first


def brought_ahead_family(blocks: int) -> Metric:
    """What has come to the device for preempted requests while they waited."""
    text = "Device blocks brought for preempted requests before their turn."
    return CounterMetricFamily("crosskv_brought_ahead_blocks", text, value=blocks)


def build(parts: EngineParts) -> PreemptedKV:
    """Return the path of an engine."""
    score, needs_landing = parts.scores.score, not parts.groups.is_plain
    return PreemptedKV(
        parts.port, parts.saves, parts.block_size, parts.loop.call, score, parts.control, needs_landing=needs_landing
    )
