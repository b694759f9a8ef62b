"""When a conversation's next turn comes, learned from those that came: a rate for every age of the silence.

A conversation is silent from the end of an answer on. The silence is cut into ages, each √2 times as long as the one
before; within an age the next turn comes at a constant rate (the piecewise exponential model of survival analysis:
Friedman, *Piecewise exponential models for survival data with covariates*, Annals of Statistics 10, 1982). Its
estimate is turns that came in that age divided by seconds that conversations were silent in it, so conversations that
never come back count too, as soon as they have been silent for that long, and nobody waits for the last of them.

Conversations that have had many turns come back sooner and more often, so each range of turn numbers has rates of its
own, drawn towards those of all turns while it has seen little; those of all turns are drawn towards a rate that knows
no scale: `PRIOR_TURNS` turns for each time that the silence becomes e times as long. What was seen decays by half with
every ``half_life_turns`` answers.
"""

from bisect import bisect_right
from math import exp, exp2, log

FIRST_AGE_S = 0.25
GROWTH = 2**0.5
PRIOR_TURNS = 0.1
"""With it, 6 of 10 conversations come back within an hour."""
PRIOR_WEIGHT = 2.0
"""Turns that must have come in an age until what was seen weighs as much as what was assumed."""
TURN_RANGES = (1, 2, 3, 5, 9)
"""First turn number of each range with rates of its own."""

REFRESH_ANSWERS = 32
"""Rates are reckoned anew after so many answers: every silence asks for several of them, and they change slowly."""

_LARGEST_WEIGHT = 2.0**60


class ThinkTimes:
    """Rates by turn number and age of the silence. One thread; every method is O(ages), and there are about 30."""

    def __init__(self, half_life_turns: float = 5000.0, horizon_s: float = 3600.0) -> None:
        """Learn silences up to ``horizon_s``; later turns are not expected. Raises ValueError below one second."""
        if horizon_s < 1.0:
            raise ValueError(f"the horizon of think times must be at least a second, got {horizon_s}")
        self.horizon_s = horizon_s
        edges = [0.0, FIRST_AGE_S]
        while edges[-1] * GROWTH < horizon_s:
            edges.append(edges[-1] * GROWTH)
        self._edges = [*edges, horizon_s]
        self.ages = ages = len(edges)
        self._growth_per_answer = exp2(1.0 / half_life_turns)
        self._weight = 1.0
        # Row 0 is all turns, row i + 1 the range TURN_RANGES[i].
        self._turns = [[0.0] * ages for _ in range(len(TURN_RANGES) + 1)]
        self._seconds = [[0.0] * ages for _ in range(len(TURN_RANGES) + 1)]
        self._rates: dict[tuple[int, int], float] = {}
        self._median_s: float | None = None
        self._stale = 0

    def age_of(self, silence_s: float) -> int:
        """Return the number of the age that a silence has reached; at the horizon, the number of ages."""
        return bisect_right(self._edges, max(0.0, silence_s)) - 1

    def end_of(self, age: int) -> float:
        """Return the seconds of silence at which an age ends."""
        return self._edges[age + 1]

    def answered(self) -> None:
        """Count an answer: what was seen before weighs a little less from now on."""
        self._weight *= self._growth_per_answer
        self._stale += 1
        if self._stale >= REFRESH_ANSWERS:
            self._stale = 0
            self._rates.clear()
            self._median_s = None
        if self._weight > _LARGEST_WEIGHT:
            for table in (self._turns, self._seconds):
                for row in table:
                    row[:] = [value / self._weight for value in row]
            self._weight = 1.0

    def stayed_silent(self, turn: int, age: int) -> None:
        """Note that a conversation whose last answer was its ``turn``-th has been silent through a whole age."""
        seconds = (self._edges[age + 1] - self._edges[age]) * self._weight
        for row in (0, _range(turn)):
            self._seconds[row][age] += seconds

    def came_back(self, turn: int, silence_s: float) -> None:
        """Note that the next turn came; the ages before its own were told by `stayed_silent`."""
        age = self.age_of(silence_s)
        if age >= len(self._edges) - 1:
            return
        for row in (0, _range(turn)):
            self._turns[row][age] += self._weight
            self._seconds[row][age] += (silence_s - self._edges[age]) * self._weight

    def rate(self, turn: int, age: int) -> float:
        """Return the turns a second that come in an age, of conversations whose last answer was their ``turn``-th."""
        key = (_range(turn), age)
        known = self._rates.get(key)
        if known is None:
            known = self._rates[key] = self._drawn_towards(self._pooled_rate(age), *key)
        return known

    def _pooled_rate(self, age: int) -> float:
        width = self._edges[age + 1] - self._edges[age]
        folds = log(self._edges[age + 1] / self._edges[age]) if age else 1.0
        return self._drawn_towards(PRIOR_TURNS * folds / width, 0, age)

    def _drawn_towards(self, rate: float, row: int, age: int) -> float:
        turns, seconds = self._turns[row][age] / self._weight, self._seconds[row][age] / self._weight
        return (turns + PRIOR_WEIGHT) / (seconds + PRIOR_WEIGHT / rate)

    def probability(self, turn: int, silence_s: float, window_s: float) -> float:
        """Return how likely the next turn comes in the next ``window_s`` seconds, given ``silence_s`` without it."""
        expected, at, end = 0.0, max(0.0, silence_s), min(silence_s + window_s, self.horizon_s)
        age = self.age_of(at)
        while at < end:
            until = min(end, self._edges[age + 1])
            expected += self.rate(turn, age) * (until - at)
            at, age = until, age + 1
        return 1.0 - exp(-expected)

    def median_s(self) -> float:
        """Return the silence within which half of the next turns come, those that come at all, after any turn."""
        if self._median_s is None:
            survived, lasting = [1.0], self._edges
            for age in range(self.ages):
                survived.append(survived[-1] * exp(-self._pooled_rate(age) * (lasting[age + 1] - lasting[age])))
            middle = (1.0 + survived[-1]) / 2
            age = next(age for age in range(self.ages) if survived[age + 1] <= middle)
            share = log(survived[age] / middle) / log(survived[age] / survived[age + 1])
            self._median_s = lasting[age] + share * (lasting[age + 1] - lasting[age])
        return self._median_s

    def probability_of_next(self, turn: int, silence_s: float) -> float:
        """Return how likely there is a next turn at all, before the horizon."""
        return self.probability(turn, silence_s, self.horizon_s)


def _range(turn: int) -> int:
    return max(1, bisect_right(TURN_RANGES, turn))
