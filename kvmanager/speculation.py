"""Which conversations' KV should lie on which device now, because their next turn is likely to come soon.

A conversation is told by `answered` when its answer ends and by `arrived` when a prompt begins with it. Between the two
it is silent, and what its KV on the device is worth per block is

    P(next turn within a window | silent for so long, n-th answer) x seconds that loading it takes / blocks

with P from `kvmanager.think_time`, and a window of half the median think time. Each replica has a budget of blocks; of
the conversations that were last served there, those worth most are *wanted* on its device, as far as the budget
reaches. `orders` has those of them pinned that are there, the others promoted, within a budget of bytes a second, and
unpins what is no longer wanted. All else is left to the device's own order of eviction.

The turn that comes settles what was done: a promotion was *used* or *wasted*; a turn whose KV was not there was
*missed*. The next turn will be routed to the replica that served the last, for routing prefers the KV on its device;
unless that one is gone or refuses again and again for want of room: then to the one with most of its budget free.

A conversation's worth is reckoned anew when its silence reaches another age. O(log n) per event, and O(wanted) for each
call of `orders`. Time is passed in, nothing is random, one thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvmanager.conversations import Alarm, Conversation, Conversations
from kvmanager.directives import DirectiveKind, Outcome
from kvmanager.keys import BlockHash
from kvmanager.score_heap import ScoreHeap
from kvmanager.speculation_desk import Desk
from kvmanager.speculation_orders import Order, SpeculationCounters, SpeculationSetting
from kvmanager.think_time import ThinkTimes

UNPIN_AFTER_S = 2.0
"""A turn that has come holds its blocks itself once the engine has begun with it; until then their pins stay."""
HEARD_S = 0.5
"""What a promotion has brought is reported by the device a little after it is done."""
OVERLOADED_REFUSALS = 3
"""A device that has refused so many promotions in a row has no room for conversations; they are expected elsewhere."""


class Speculator:
    """See the module. ``held(replica, hashes)``: how many leading ones of these blocks a replica's device holds."""

    def __init__(self, setting: SpeculationSetting, held: Callable[[str, Sequence[BlockHash]], int]) -> None:
        self.setting = setting
        self.counters = SpeculationCounters()
        self.block_bytes = 0
        """Of one block on the device; 0, not known yet: nothing is ordered."""
        self.think_times = ThinkTimes(horizon_s=setting.horizon_s)
        self._held = held
        self._conversations = Conversations(setting.most_blocks)
        self._desks: dict[str, Desk] = {}
        self._ages: ScoreHeap[Alarm] = ScoreHeap()
        self._under_way: dict[int, tuple[DirectiveKind, Conversation]] = {}
        self._last_id = 0
        self._pins_over: deque[tuple[float, str, list[BlockHash]]] = deque()
        """From when, where and what to unpin."""

    # What happens

    def set_budget(self, replica: str, blocks: int) -> None:
        """Let so many blocks of a replica's device be wanted."""
        if replica not in self._desks:
            self._desks[replica] = Desk(self.setting.advantage)
        self._desks[replica].wanted.budget_blocks = blocks

    def answered(self, now: float, replica: str, hashes: Sequence[BlockHash], prompt_blocks: int) -> None:
        """Note that an answer has ended: ``hashes`` are the full blocks of the prompt and of the answer."""
        self.counters.answers += 1
        self.think_times.answered()
        if not hashes:
            return
        conversation, equal, oldest = self._conversations.add(replica, hashes, prompt_blocks, now)
        for other in equal + oldest:
            self._let_go(now, other)
        self.counters.forgotten += len(oldest)
        if conversation not in oldest:
            self._ages.push(conversation.alarm, now + self.think_times.end_of(0))
            self._weigh(now, conversation)

    def arrived(self, now: float, replica: str, hashes: Sequence[BlockHash]) -> bool | None:
        """Note that a prompt comes to a replica, before anything is loaded for it.

        Returns whether its conversation's KV is all on the device there; None: it continues no known one.
        O(len(hashes)).
        """
        match = self._conversations.find(hashes)
        if match is None:
            return None
        conversation, known = match
        self._conversations.discard(conversation)
        self._conversations.runs(hashes, conversation.turn + 1)
        self.think_times.came_back(conversation.turn, now - conversation.silent_since)
        found = self._held(replica, hashes[:known]) == known
        counters = self.counters
        counters.next_turns += 1
        counters.found += found
        counters.missed += not found
        if found and replica == conversation.replica and conversation.is_promoted:
            conversation.is_promoted = False
            counters.used += 1
        self._let_go(now + UNPIN_AFTER_S, conversation)
        return found

    def forget_replica(self, now: float, replica: str) -> None:
        """Note that a replica is gone; its conversations' next turns will go elsewhere. O(conversations)."""
        homeless = [conversation for conversation in self._conversations if conversation.replica == replica]
        for conversation in homeless:
            self._abandon(now, conversation)
        self._desks.pop(replica, None)
        self._pins_over = deque(over for over in self._pins_over if over[1] != replica)
        for conversation in homeless:
            self._move_elsewhere(now, conversation)

    def clear(self, now: float) -> None:
        """Forget all conversations: somebody wants their KV off the devices. What was learned stays. O(n)."""
        for conversation in list(self._conversations):
            self._conversations.discard(conversation)
            self._let_go(now, conversation)

    # What to do

    def orders(self, now: float) -> list[Order]:
        """Return what to do now, in this order. What has an id is ended by `ended`."""
        self._let_time_pass(now)
        orders: list[Order] = []
        if self.block_bytes:
            for replica, desk in self._desks.items():
                for conversation in desk.wanted.choose():
                    self._unpin(now, conversation)
                orders += self._order(now, replica, desk)
        return [*self._unpins(now), *orders]

    def ended(self, now: float, order_id: int, outcome: str) -> None:
        """Note what became of a promotion or a pin: an `Outcome`, or that nothing could be ordered."""
        kind, conversation = self._under_way.pop(order_id, (None, None))
        done = outcome == Outcome.DONE
        self.counters.refused += not done
        if conversation is None:  # its turn has come meanwhile, or it is forgotten
            return
        conversation.order_id = 0
        if done and kind is DirectiveKind.PIN:
            self.counters.pinned += 1
        elif done:
            self.counters.promoted += 1
            conversation.is_promoted = True
            if conversation.replica in self._desks:
                self._desks[conversation.replica].refusals = 0
            conversation.not_before = now + HEARD_S
        else:
            self._refused(now, kind, conversation, outcome)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes, for metrics and the control API. O(replicas)."""
        return {
            **asdict(self.counters),
            "conversations": len(self._conversations),
            "remembered_blocks": self._conversations.blocks,
            "under_way": len(self._under_way),
            "wanted_blocks": {replica: desk.wanted.blocks for replica, desk in self._desks.items()},
        }

    # Inside

    def _let_time_pass(self, now: float) -> None:
        """Reckon anew what has reached another age; forget what has reached the horizon. O(log n) for each."""
        while (alarm := self._ages.lowest()) is not None:
            conversation = alarm.conversation
            border = conversation.silent_since + self.think_times.end_of(conversation.age)
            if border > now:
                return
            self.think_times.stayed_silent(conversation.turn, conversation.age)
            conversation.age += 1
            if conversation.age == self.think_times.ages:
                self._conversations.discard(conversation)
                self._let_go(now, conversation)
                continue
            self._ages.update(alarm, conversation.silent_since + self.think_times.end_of(conversation.age))
            self._weigh(border, conversation)

    def _weigh(self, now: float, conversation: Conversation) -> None:
        """Reckon a conversation's worth, and let its replica choose."""
        desk = self._desks.get(conversation.replica)
        if desk is None:
            return
        setting = self.setting
        times = self.think_times
        window_s = max(setting.least_window_s, setting.window_share * times.median_s())
        probability = times.probability(conversation.turn, now - conversation.silent_since, window_s)
        load_s = setting.load_latency_s + conversation.blocks * self.block_bytes / setting.load_bytes_per_s
        conversation.score = probability * load_s / conversation.blocks
        if probability < setting.least_probability:
            desk.wanted.remove(conversation)
            self._unpin(now, conversation)
        else:
            desk.wanted.offer(conversation)

    def _order(self, now: float, replica: str, desk: Desk) -> list[Order]:
        """Order what is wanted, what is worth most first; promotions as far as the moves' budget reaches."""
        setting = self.setting
        desk.earn(now, setting.move_bytes_per_s, setting.order_s)
        orders: list[Order] = []
        for conversation in sorted(desk.wanted, key=lambda conversation: -conversation.score):
            if conversation.order_id or now < conversation.not_before:
                continue
            if self._held(replica, [conversation.last_hash()]):
                if conversation.pinned_until < now + setting.pin_s / 2:
                    orders.append(self._start(DirectiveKind.PIN, conversation))
                    if not conversation.pinned_until:
                        desk.pins.add(orders[-1].hashes)
                    conversation.pinned_until = now + setting.pin_s
            elif conversation.is_promoted:  # it did not stay, or not all of it is stored
                self._waste(conversation)
                self._unpin(now, conversation)
                conversation.not_before = now + setting.retry_s
            elif desk.credit_bytes > 0.0 and now >= desk.paused_until:
                self._unpin(now, conversation)  # the device has let go of it
                orders.append(self._start(DirectiveKind.PROMOTE, conversation))
                here = self._held(replica, orders[-1].hashes)
                desk.credit_bytes -= (conversation.blocks - here) * self.block_bytes
                self.counters.predicted += 1
        return orders

    def _start(self, kind: DirectiveKind, conversation: Conversation) -> Order:
        self._last_id += 1
        conversation.order_id = self._last_id
        self._under_way[self._last_id] = (kind, conversation)
        replica, deadline_s, ttl_s = conversation.replica, self.setting.order_s, self.setting.pin_s
        return Order(self._last_id, kind, replica, conversation.hashes(), deadline_s, ttl_s)

    def _refused(self, now: float, kind: DirectiveKind | None, conversation: Conversation, outcome: str) -> None:
        conversation.not_before = now + self.setting.retry_s
        desk = self._desks.get(conversation.replica)
        if desk is None:
            return
        if conversation.pinned_until:
            self._unpin(now, conversation)
        if outcome == Outcome.REFUSED_FULL and kind is DirectiveKind.PROMOTE:
            desk.wanted.remove(conversation)  # until its silence reaches another age: others may fit
            desk.paused_until = now + self.setting.retry_s
            desk.refusals += 1
            if desk.refusals >= OVERLOADED_REFUSALS:
                self._move_elsewhere(now, conversation)

    def _unpin(self, due: float, conversation: Conversation) -> None:
        if conversation.pinned_until:
            conversation.pinned_until = 0.0
            self._pins_over.append((due, conversation.replica, conversation.hashes()))

    def _unpins(self, now: float) -> list[Order]:
        orders: list[Order] = []
        while self._pins_over and self._pins_over[0][0] <= now:
            _, replica, hashes = self._pins_over.popleft()
            desk = self._desks.get(replica)
            if desk is not None and (over := desk.pins.take(hashes)):
                orders.append(Order(0, DirectiveKind.UNPIN, replica, over, self.setting.order_s, 0.0))
        return orders

    def _move_elsewhere(self, now: float, conversation: Conversation) -> None:
        """Expect the next turn at the replica with most of its budget free, if it fits there. O(replicas)."""
        desks = [(desk.wanted.room, name) for name, desk in self._desks.items() if now >= desk.paused_until]
        room, name = max(desks, default=(0, ""))
        if room < conversation.blocks:
            return
        self._abandon(now, conversation)
        conversation.replica = name
        self._weigh(now, conversation)

    def _let_go(self, unpin_from: float, conversation: Conversation) -> None:
        """Take a conversation that is no longer remembered out of everything."""
        self._abandon(unpin_from, conversation)
        self._ages.discard(conversation.alarm)

    def _abandon(self, unpin_from: float, conversation: Conversation) -> None:
        """Give up what was done for a conversation at its replica."""
        self._under_way.pop(conversation.order_id, None)
        conversation.order_id = 0
        self._unpin(unpin_from, conversation)
        self._waste(conversation)
        desk = self._desks.get(conversation.replica)
        if desk is not None:
            desk.wanted.remove(conversation)

    def _waste(self, conversation: Conversation) -> None:
        if conversation.is_promoted:
            conversation.is_promoted = False
            self.counters.wasted += 1
            self.counters.wasted_blocks += conversation.blocks
