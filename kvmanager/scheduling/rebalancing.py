"""Requests that change their replica: streams that leave one short of KV, and prompts that one prefills for another.

`Rebalancing` says which streams leave, where to, and when, after Llumnix (Sun et al., *Dynamic Scheduling for Large
Language Model Serving*, OSDI 2024). A router does not know how long answers will be, so one replica comes to preempt
while another has room. A replica is *short* when what its running requests hold, and what the head of its queue waits
for, is `SHORT_SHARE` of its pool. After `SHORT_REPORTS` reports that say so it gives the longest stream that fits
elsewhere to the replica with the most room.

Invariants, in any sequence of calls:

* what a target holds, and all that the stream is expected to need, is at most `ROOM_SHARE` of its pool. So nothing
  comes back without new load: the target would have to be short first, and the source to have had room;
* a source gives one stream in `SHORT_REPORTS` reports, a target takes one in `SETTLE_S`, and a call moves `AT_ONCE`;
* a stream that has moved stays for `STAY_S`, and after `MOST_MOVES` moves for ever.

Where a stream's prefix is shared less becomes free than it has: the next report says so. O(streams log streams) where
a replica is short, O(replicas) otherwise.

`HandoverChoice` says which prompts are prefilled on one replica and decoded on another. Pure; one thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from kvmanager.loading.changing_time import ChangingTime
from kvmanager.routing.roles import Phase
from kvmanager.scheduling.jobs import new_job

SHORT_SHARE = 0.9
SHORT_REPORTS = 3
"""In a row. Replicas report every two seconds, and the end of any stream may be all that is needed."""
ROOM_SHARE = 0.7
SETTLE_S = 10.0
"""By then a target's report counts what it took."""
STAY_S = 30.0
MOST_MOVES = 3
"""Each one is a pause for its client."""
AT_ONCE = 2
LEAST_TO_COME = 64
"""Tokens of its answer. What ends sooner frees its blocks by itself."""

HALF_LIFE_SAMPLES = 64.0
HALF_LIFE_S = 600.0
LEAST_SAMPLES = 4
"""Of each kind, before the measured break-even counts; `least_tokens` alone decides until then."""
PROBE_EVERY = 32


@dataclass(frozen=True, slots=True)
class KVReport:
    """What a replica says of its device pool, in blocks. No field is negative.

    `at`: when, on a clock of its own, so that two reports of one replica can be told apart. `held`: by running
    requests; what is only cached can be taken. `wanted`: by those at the head of its queue that wait for room,
    preempted ones among them; 0 where they fit.
    """

    at: float
    blocks: int
    held: int
    wanted: int = 0

    @property
    def is_short(self) -> bool:
        """See the module's docstring."""
        return self.held + self.wanted >= SHORT_SHARE * self.blocks


@dataclass(frozen=True, slots=True)
class LiveStream:
    """An answer under way, and its prompt. `since`: when its replica took it, on the clock that `decide` is given.

    `to_come`: tokens that the answer is expected to have yet. `moves`: how often it went on elsewhere, for whatever
    reason. `phase`: as what it would.
    """

    name: str
    replica: str
    prompt_tokens: int
    answered: int
    to_come: int
    since: float
    moves: int = 0
    phase: Phase = ""
    movable: bool = True

    @property
    def tokens(self) -> int:
        """Of which there is KV by now, or soon."""
        return self.prompt_tokens + self.answered


@dataclass(frozen=True, slots=True)
class StreamMove:
    """An order to continue a stream on another replica."""

    stream: LiveStream
    target: str


def to_come(predicted: int | None, answered: int, most: int) -> int:
    """Return how many tokens an answer is expected to have yet, as the engine's policies reckon."""
    job = new_job(0.0, 0, most, predicted)
    job.answered = answered
    return ceil(job.answer_left)


class Rebalancing:
    """See the module's docstring."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._heard: dict[str, float] = {}
        """When each replica's last report was made."""
        self._short: Counter[str] = Counter()
        """Reports in a row that say so."""
        self._settled: dict[str, float] = {}
        """When a target may take the next one."""

    def decide(
        self,
        now: float,
        reports: Mapping[str, KVReport],
        streams: Callable[[], Iterable[LiveStream]],
        may_go: Callable[[str, Phase], bool] = lambda replica, phase: True,
    ) -> list[StreamMove]:
        """Return the streams to move now; the caller moves them. ``reports``: of the replicas that live.

        ``streams`` is asked only where a replica is short. ``may_go``: whether a replica takes what has this phase.
        """
        self._hear(now, reports)
        sources = sorted(
            (name for name in reports if self._short[name] >= SHORT_REPORTS),
            key=lambda name: reports[name].held / reports[name].blocks,
            reverse=True,
        )
        if not sources:
            return []
        by_replica: defaultdict[str, list[LiveStream]] = defaultdict(list)
        for stream in streams():
            by_replica[stream.replica].append(stream)
        room = {
            name: self._room(report, by_replica[name]) for name, report in reports.items() if name not in self._settled
        }
        moves: list[StreamMove] = []
        for source in sources:
            move = self._relieve(now, by_replica[source], room, may_go)
            if move is not None:
                moves.append(move)
                del room[move.target]
                self._short[source], self._settled[move.target] = 0, now + SETTLE_S
            if len(moves) == AT_ONCE:
                break
        return moves

    def _hear(self, now: float, reports: Mapping[str, KVReport]) -> None:
        for name, report in reports.items():
            if report.at != self._heard.get(name):
                self._short[name] = self._short[name] + 1 if report.is_short else 0
        self._heard = {name: report.at for name, report in reports.items()}
        self._short = Counter({name: self._short[name] for name in reports})
        self._settled = {name: at for name, at in self._settled.items() if at > now}

    def _room(self, report: KVReport, streams: Iterable[LiveStream]) -> int:
        """Blocks that a target may take. What has no token yet may not be in its report."""
        pending = sum(self._blocks(stream.prompt_tokens) for stream in streams if not stream.answered)
        return int(ROOM_SHARE * report.blocks) - report.held - report.wanted - pending

    def _relieve(
        self,
        now: float,
        streams: Iterable[LiveStream],
        room: Mapping[str, int],
        may_go: Callable[[str, Phase], bool],
    ) -> StreamMove | None:
        for stream in sorted(streams, key=lambda stream: stream.tokens, reverse=True):
            if not (stream.movable and stream.answered and stream.to_come >= LEAST_TO_COME):
                continue
            if stream.moves >= MOST_MOVES or (stream.moves and now - stream.since < STAY_S):
                continue
            targets = [name for name in room if may_go(name, stream.phase)]
            best = max(targets, key=lambda name: room[name], default=None)
            if best is not None and self._blocks(stream.tokens + stream.to_come) <= room[best]:
                return StreamMove(stream, best)
        return None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)


class HandoverChoice:
    """Whether to prefill a prompt on one replica and decode it on another: only where that pays, by measured times.

    A hand-over spares the decode replica's other requests the prompt's prefill, and costs this one a gap between its
    first two tokens: the save's end, one more hop, the load. So it pays where computing what the decode replica lacks
    of the prompt would take longer than that gap. Both are measured: the prefill by its engine, the gap by the caller
    that hands over. What does not pay now may pay later, so one prompt of `PROBE_EVERY` is handed over all the same.
    """

    def __init__(self, least_tokens: int, measures: bool = True) -> None:
        """``least_tokens``: fewer uncached ones are never handed over; not ``measures``: as many always are."""
        self._measures = measures
        self._least_tokens = least_tokens
        self._prefill = ChangingTime(1, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._gap = ChangingTime(1, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._declined = 0

    def prefilled(self, now: float, tokens: int, seconds: float) -> None:
        """Note that a prefill replica has computed ``tokens`` in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self._prefill.add([float(tokens)], seconds, now)

    def handed_over(self, now: float, prompt_tokens: int, seconds: float) -> None:
        """Note that a prompt's second token came ``seconds`` after its first."""
        if seconds > 0:
            self._gap.add([float(prompt_tokens)], seconds, now)

    def break_even_tokens(self, prompt_tokens: int) -> int:
        """From how many uncached tokens on a prompt of this length is handed over."""
        prefill_s = self._prefill.coefficients[1]
        if not self._measures or min(self._prefill.samples, self._gap.samples) < LEAST_SAMPLES or prefill_s <= 0:
            return self._least_tokens
        gap_s = self._gap.seconds(float(prompt_tokens)) - self._prefill.coefficients[0]
        return max(self._least_tokens, int(gap_s / prefill_s))

    def pays(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        """Return whether to hand over a prompt of which the best decode replica lacks ``uncached_tokens``."""
        if uncached_tokens < self._least_tokens:
            return False
        if uncached_tokens >= self.break_even_tokens(prompt_tokens):
            return True
        self._declined += 1
        return self._declined % PROBE_EVERY == 0
