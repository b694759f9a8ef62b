"""How many requests the ingress works on, how many may wait, and that one more is refused at once: fairly by tenant.

Invariants:

* turns take no more than `max_ongoing` places, and no more than `max_ongoing + max_queued` answers are admitted;
* a request is refused (`OverloadedError`, 429) before its response starts, never after, and never once admitted;
* a tenant finds room up to its slice, whatever the others do (`app.gate.fair_shares`), among those admitted and those
  whose turn it is;
* whose turn it is: the tenant that was served least, by cost and weight (`app.gate.fair_shares`);
* a ticket that is closed, or a waiting caller that is cancelled, frees its room at once.

Everything runs on the ingress's event loop; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm.exceptions import VLLMValidationError

from app.gate.errors import OverloadedError
from app.gate.fair_shares import FairLine, FairShares
from configs.settings import Settings
from kvmanager.scheduling.virtual_counters import Bill, ServedWork, VirtualCounters

TURN_SLICE_SHARE = 0.25
"""Part of the turns that is divided among the tenants: what a tenant that is alone leaves unused for a newcomer."""


class Ticket:
    """The room that one HTTP request holds in an `AdmissionQueue`, from its admission to its end."""

    def __init__(self, queue: AdmissionQueue, tenant: str = "") -> None:
        self._queue = queue
        self._tenant = tenant
        self._held = 0

    def admit(self, sequences: int) -> None:
        """Hold room for `sequences` more answers (OpenAI's `n`, for each prompt).

        Raises:
            VLLMValidationError: they would not fit even without other requests.
            OverloadedError: they do not fit now.
        """
        if self._held + sequences > self._queue.rooms.most:
            raise VLLMValidationError(
                f"This server computes at most {self._queue.rooms.most} answers per request, over all its prompts.",
                parameter="n",
            )
        if not self._queue.rooms.take(self._tenant, sequences):
            full = self._queue.rooms.held + sequences > self._queue.rooms.capacity
            self._queue.count_refusal("full" if full else "tenant_share")
            raise OverloadedError
        self._held += sequences

    def close(self) -> None:
        """Give the room back. Idempotent."""
        if self._held:  # a tenant that may not ask at all has no room to give back
            self._queue.rooms.give_back(self._tenant, self._held)
        self._held = 0


class AdmissionQueue:
    """A bounded queue in front of the replicas. `rooms` counts answers, `ongoing` and `waiting` count prompts."""

    def __init__(
        self,
        max_ongoing: int,
        max_queued: int,
        tenants: Collection[str] = (),
        turns: int = 0,
        weights: Mapping[str, float] | None = None,
        shortest: bool = False,
    ) -> None:
        """`turns`: places that prompts may take at once, no more than `max_ongoing`; 0: that many.

        `weights`: of tenants, 1 where they have none; `shortest`: within a tenant short prompts go first.
        """
        self.rooms = FairShares(max_ongoing + max_queued, tenants)
        self.ongoing = 0
        self.count_refusal: Callable[[str], None] = lambda reason: None
        """Told of every refusal: "full", or "tenant_share" while others' slices were free."""
        self.turns_per_replica = 0
        """Places that come and go with each replica; 0: they stay as they are."""
        self._max_ongoing = max_ongoing
        self._turns = FairShares(min(turns, max_ongoing) or max_ongoing, tenants, TURN_SLICE_SHARE)
        self._counters = VirtualCounters(tenants or ("",), weights)
        self._line: FairLine[_Waiting] = FairLine(self._turns, self._counters, shortest)
        self.count_cost: Callable[[str, float], None] = lambda tenant, cost: None
        """Told of a tenant's prompt that has ended what it has cost (`kvmanager.scheduling.virtual_counters`)."""

    @classmethod
    def from_settings(cls, settings: Settings) -> AdmissionQueue:
        """With one tenant, replicas queue what they cannot compute at once: so they know what comes.

        With several, no more is sent than they compute at once. What waits in an engine waits in the order in which it
        came, and a tenant with many requests would be before all others there. So its scheduler sees no queue, and the
        order that it would give them is given here.
        """
        http, tenants = settings.http, settings.http.tenants
        at_once = max(settings.min_replicas * settings.engine.max_num_seqs, len(tenants))
        turns = at_once if len(tenants) > 1 else 0
        shortest = settings.engine.scheduler == "shortest"
        queue = cls(
            http.max_ongoing_requests, http.max_queued_requests, tenants, turns, settings.of_tenants("weight"), shortest
        )
        queue.turns_per_replica = settings.engine.max_num_seqs if turns and settings.scales else 0
        return queue

    def follow(self, replicas: int) -> None:
        """Set the number of replicas: the places in which prompts are computed come and go with them.

        Turns that have begun go on; where there are more of them than places, none begins until enough have ended.
        """
        if self.turns_per_replica:
            self._turns.resize(min(self._max_ongoing, max(1, replicas) * self.turns_per_replica))
            self._begin_turns()

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._line)

    @asynccontextmanager
    async def turn(self, tenant: str = "", answers: int = 1, work: ServedWork = ServedWork()) -> AsyncIterator[Bill]:  # noqa: B008
        """Wait for this prompt's turn, and hold it; the caller tells the bill what the prompt turns out to cost."""
        bill = Bill(self._counters, tenant, work)
        bill.on_close = self.count_cost
        turn = _Waiting(tenant, asyncio.get_running_loop().create_future(), bill)
        self._line.join(tenant, turn, answers, work.cost)
        self._begin_turns()
        try:
            await turn.begins
            yield bill
        finally:
            if turn.places:
                self.ongoing -= 1
                self._turns.give_back(tenant, turn.places)
                bill.close()
            else:
                self._line.leave(tenant, turn)
            self._begin_turns()  # also when one has left the line: others may have waited for it

    def _begin_turns(self) -> None:
        while (following := self._line.next()) is not None:
            turn, places = following
            turn.places = places
            turn.bill.send()  # before the next turn is given: it depends on what this one costs
            self.ongoing += 1
            if not turn.begins.done():  # else its caller has been cancelled, and is about to give it back
                turn.begins.set_result(None)


@dataclass(eq=False, slots=True)
class _Waiting:
    tenant: str
    begins: asyncio.Future[None]
    bill: Bill
    places: int = 0
    """What it has got; 0: it waits."""
