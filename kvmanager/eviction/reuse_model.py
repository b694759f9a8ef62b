"""When will a segment be used again? Learned online, from every request, as a survival curve.

Segments that one request used together and that look alike form a *cohort*; what they look like is their *profile*: how
often used, in how many branches, how many segments of its prompt were new, at what pace its conversation goes, ...
A cohort ages in requests; its age lies in one of `EDGES`'s intervals. Whenever it leaves an interval, or is used in it,
the model learns one fact: of n segments of this profile, k were used again at this age. The chance of that
(the *hazard*) is a logistic regression over the profile's features, each with one weight in all and two that depend on
age, coarsely and finely (discrete-time survival analysis: Efron, JASA 1988; AdaGrad: Duchi et al., JMLR 2011). It
starts as decayed LFU ranks: chances grow with the uses and shrink with the age. What never helps stays without weight.

From its curve a profile gets, for each age, an *index*: the largest expected number of uses per request of keeping,
over all times one might keep it (Gittins 1979; hit density of LHD, Beckmann et al., NSDI 2018, without a fixed
lifetime). The index falls when the usual think time is over, *rises* with age in a loop, and is the same for a scan's
segments whatever their age: LFU, LRU and MRU are all in it, and which one holds is learned. It forgets at restart.

Costs: a use costs one append on the request's path (`used`); the rest is done by `offered` and `request`, O(features)
per cohort and age interval, and slows to a sample once `LEARN_ALL` requests were seen. Memory: a cohort of about 250
bytes for each request and profile, as long as one of its segments is known. One thread.
"""

from collections import deque
from itertools import pairwise
from math import exp, log, log2
from typing import NamedTuple, Protocol, cast
from weakref import WeakValueDictionary, ref

from kvmanager.index.nodes import Node
from kvmanager.segments.spans import NodeKind

EDGES = (0.0, 8.0, 16.0, *(16 * 2 ** (half / 2) for half in range(1, 22)))
"""Where the intervals of age begin, in requests: two to an octave, up to 23,000; the last has no end."""
AGES = len(EDGES)
WIDTHS = (*(end - start for start, end in pairwise(EDGES)), EDGES[-1])
COARSE, FINE = 4, 2
"""Intervals that share an age-dependent weight."""
LEVELS = tuple((0, 1 + age // COARSE, 2 + AGES // COARSE + age // FINE) for age in range(AGES))
"""The weights of a feature that count at each age."""
NUM_WEIGHTS = LEVELS[-1][2] + 1
RATE = 0.05
FIRST_CHANCES = tuple(-3.0 - 0.05 * age for age in range(AGES))
"""Log-odds of a use in each interval before anything is learned: intervals double, so the hazard falls with the age."""
FIRST_LOSS = 0.4
"""How much each doubling of a request's new segments lowers the chance, in log-odds, before anything is learned."""
NEWEST_GAP = 0.3
"""Least weight of a conversation's newest gap in its pace; a mean of all gaps until then."""
LEARN_ALL = 1 << 14
"""Requests after which only one in `SAMPLE` is learned from."""
SAMPLE = 8
REFRESH = 32
"""Profiles whose index is recomputed with each request that is learned from."""

Key = tuple[int, ...]


class Shelf(Protocol):
    """What a policy keeps of one cohort."""

    def aged(self) -> None:
        """Note that the cohort has entered the next interval of age."""


class Ranked(Protocol):
    """What a policy orders by the index of one profile."""

    def reranked(self) -> None:
        """Note that the index of the profile has changed."""


class _RequestFacts(NamedTuple):
    """What the segments of one request have in common."""

    pace: float
    """Mean of the binary logarithms of the requests between the conversation's turns."""
    gaps: int
    """Of these, how many."""
    new: int
    """Class of the number of segments that no request had used before."""
    reach: int
    """Class of the uses of the deepest segment that an earlier request had used."""


class Profile:
    """What segments look like that are treated alike."""

    __slots__ = ("__weakref__", "index", "key", "ranked", "rows", "squares")

    def __init__(self, key: Key, rows: list[list[float]], squares: list[list[float]]) -> None:
        self.key = key
        self.rows = rows
        self.squares = squares
        self.index: list[float] = []
        """For each age: expected uses per request of keeping a segment."""
        self.ranked: list[Ranked] = []


class Cohort:
    """Segments of one profile that one request used last."""

    __slots__ = ("age", "alive", "profile", "request", "shelves", "size", "turn")

    def __init__(self, profile: Profile, turn: _RequestFacts, request: int) -> None:
        self.profile = profile
        self.turn = turn
        self.request = request
        self.age = 0
        """Number of the interval."""
        self.size = 0
        self.alive = 0
        """Segments that no later request has used."""
        self.shelves: list[Shelf] = []

    @property
    def index(self) -> float:
        """Expected uses per request of keeping one of its segments now."""
        return self.profile.index[self.age]


def _octave(number: int, most: int) -> int:
    return min(most, number.bit_length() - 1)


def _uses(uses: int) -> int:
    return uses - 1 if uses < 4 else min(9, uses.bit_length())


def _gap(requests: int) -> int:
    """Return the class of the time between two uses of a segment; 0: there was none, or many share it."""
    return min(11, requests.bit_length() - 4) if requests >= 16 else 0


def _pace(turn: _RequestFacts) -> int:
    """Return the class of a conversation's pace, two to an octave; 0: it has none yet."""
    return max(1, min(15, int(1 + 2 * (turn.pace - 4)))) if turn.gaps else 0


def _cohort(node: Node) -> Cohort | None:
    """Return what the model has put there: a node knows nothing of cohorts."""
    return cast("Cohort | None", node.cohort)


def _is_head(node: Node) -> bool:
    """Whether many conversations begin with a segment: what happened to it says nothing about one of them."""
    return node.parent is None and node.branches > 1


def _is_of_answer(node: Node) -> bool:
    """Whether the model sampled a token of a segment; of states, of the segment that they follow on."""
    tokens = node.parent if node.kind is NodeKind.STATE else node
    return tokens is not None and tokens.kind is NodeKind.ANSWER


class ReuseModel:
    """Online model of reuse. The catalogue has one where the eviction policy in use `learns`, and reports uses."""

    def __init__(self) -> None:
        self.requests = 0
        self._profiles: WeakValueDictionary[Key, Profile] = WeakValueDictionary()
        """What some cohort looks like. What was learned is in `_weights`, so a profile without one is not kept."""
        self._order: deque[ref[Profile]] = deque()
        """The same, the next to be refreshed first."""
        self._base = list(FIRST_CHANCES)
        self._base_squares = [1.0] * AGES
        self._weights: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        self._ages: list[deque[Cohort]] = [deque() for _ in range(AGES - 1)]
        """Cohorts by interval, those that enter it first at the head. No cohort leaves the last interval, so it has no
        list: only their segments refer to the cohorts in it."""
        self._used: list[Node] = []
        self._cohorts: dict[Key, Cohort] = {}
        self._prompt_end = 0
        self._end_block = 0
        self._new: _RequestFacts | None = None
        """Of the segments being made."""
        self._made: Node | None = None
        """The last of them."""

    def request(self, prompt_blocks: int) -> None:
        """Count one request; the uses that follow are its."""
        self._settle()
        self.requests += 1
        self._prompt_end = prompt_blocks
        self._end_block, self._new = prompt_blocks, None
        self._cohorts = {}
        self._grow_older()

    def used(self, node: Node) -> None:
        """Note that the request used a node; the deepest comes first. O(1)."""
        self._used.append(node)

    def offered(self, end_block: int) -> None:
        """Note that the nodes made next belong to a sequence that ends at ``end_block``."""
        self._settle()
        self._end_block, self._new = end_block, None
        if self._learns:
            for _ in range(min(REFRESH, len(self._order))):
                next_one = self._order.popleft()
                profile = next_one()
                if profile is not None:
                    self._refresh(profile)
                    self._order.append(next_one)

    def made(self, node: Node) -> None:
        """Note a node that was not known before; parents come first."""
        self._settle()
        parent = node.parent
        if self._new is None or parent is None or parent is not self._made:
            new = _octave(max(0, self._end_block - node.start_block) // node.num_blocks + 1, 9)
            if parent is None:
                self._new = _RequestFacts(0.0, 0, new, 0)
            else:
                before = _cohort(parent)
                if before is None or _is_head(parent):
                    self._new = _RequestFacts(0.0, 0, new, _octave(parent.uses, 9))
                else:
                    self._new = before.turn._replace(new=new)
        node.uses, self._made = 1, node
        if parent is not None:
            parent.branches += 1
        self._join(node, self._new, self._end_block, gap=0, fresh=True)

    def forgot(self, node: Node) -> None:
        """Note that a node leaves the trie: whether it is used again cannot be seen any more."""
        self._settle()
        cohort = _cohort(node)
        if cohort is not None:
            cohort.alive -= 1
            node.cohort = None

    def cohort_of(self, node: Node) -> Cohort:
        """Return the cohort that a node is in now."""
        if self._used:
            self._settle()
        if node.cohort is None:
            self.made(node)
        cohort = _cohort(node)
        assert cohort is not None
        return cohort

    @property
    def _learns(self) -> bool:
        return self.requests <= LEARN_ALL or self.requests % SAMPLE == 0

    def _settle(self) -> None:
        """Move what the last request used from its old cohorts to new ones, and learn from that."""
        if not self._used:
            return
        used, self._used = self._used, []
        deepest = used[0]
        new = max(0, self._prompt_end - deepest.end_block) // deepest.num_blocks
        pace, gaps = self._pace_after(deepest)
        turn = _RequestFacts(pace, gaps, _octave(new + 1, 9), _octave(deepest.uses + 1, 9))
        hits: dict[Cohort, int] = {}
        for node in used:
            old, gap = _cohort(node), 0
            if old is not None:
                gap = _gap(self.requests - old.request)
                old.alive -= 1
                hits[old] = hits.get(old, 0) + 1
            node.uses += 1
            self._join(node, turn, self._prompt_end, gap=gap, fresh=False)
        for cohort, number in hits.items():
            if cohort.request < self.requests:
                self._learn(cohort, number, used_again=True)

    def _pace_after(self, deepest: Node) -> tuple[float, int]:
        """Return the pace of the conversation that goes on after ``deepest``, and the gaps in it."""
        before = _cohort(deepest)
        if before is None or _is_head(deepest):
            return 0.0, 0
        gaps = before.turn.gaps + 1
        newest = log2(1 + self.requests - before.request)
        return before.turn.pace + max(1 / gaps, NEWEST_GAP) * (newest - before.turn.pace), gaps

    def _join(self, node: Node, turn: _RequestFacts, end_block: int, *, gap: int, fresh: bool) -> None:
        last = (node.end_block >= end_block) + 2 * _is_of_answer(node)
        key = (
            _uses(node.uses),
            gap,
            turn.new,
            _octave(node.branches + 1, 7),
            _pace(turn),
            last,
            fresh,
            turn.reach,
        )
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = self._cohorts[key] = Cohort(self._profile(key), turn, self.requests)
            self._ages[0].append(cohort)
        cohort.size += 1
        cohort.alive += 1
        node.cohort = cohort

    def _profile(self, key: Key) -> Profile:
        profile = self._profiles.get(key)
        if profile is None:
            pairs = [self._row(feature, value) for feature, value in enumerate(key)]
            profile = Profile(key, [row for row, _ in pairs], [squares for _, squares in pairs])
            self._profiles[key] = profile
            self._order.append(ref(profile))
            self._refresh(profile)
        return profile

    def _row(self, feature: int, value: int) -> tuple[list[float], list[float]]:
        pair = self._weights.get((feature, value))
        if pair is None:
            row = [0.0] * NUM_WEIGHTS
            if feature == 0:  # uses: what was used twice as often is twice as likely to be used again
                row[0] = log(value + 1 if value < 3 else 1.4 * 2 ** (value - 1))
            elif feature == 2:  # new segments
                row[0] = -FIRST_LOSS * value
            pair = self._weights[feature, value] = row, [1.0] * NUM_WEIGHTS
        return pair

    def _grow_older(self) -> None:
        now, ages = self.requests, self._ages
        for age in range(AGES - 2, -1, -1):
            young, edge = ages[age], EDGES[age + 1]
            while young and now - young[0].request >= edge:
                cohort = young.popleft()
                if cohort.alive:
                    self._learn(cohort, cohort.alive, used_again=False)
                elif not cohort.shelves:
                    continue
                cohort.age = age + 1
                if age + 1 < len(ages):
                    ages[age + 1].append(cohort)
                for shelf in cohort.shelves:
                    shelf.aged()

    def _learn(self, cohort: Cohort, number: int, *, used_again: bool) -> None:
        if not self._learns:
            return
        age, profile = cohort.age, cohort.profile
        all_ages, coarse, fine = LEVELS[age]
        odds = self._base[age]
        for row in profile.rows:
            odds += row[all_ages] + row[coarse] + row[fine]
        gradient = (1.0 / (1.0 + exp(-odds)) - used_again) * number / cohort.size
        square = gradient * gradient
        step = RATE * gradient
        self._base_squares[age] += square
        self._base[age] -= step / self._base_squares[age] ** 0.5
        for row, squares in zip(profile.rows, profile.squares, strict=True):
            for level in (all_ages, coarse, fine):
                squares[level] += square
                row[level] -= step / squares[level] ** 0.5

    def _refresh(self, profile: Profile) -> None:
        """Compute the index of a profile for all ages, the last first: O(ages).

        Intervals that are worth more when kept together are merged: the first of what is left is the best time to keep.
        """
        survival, chances = 1.0, []
        for age, (all_ages, coarse, fine) in enumerate(LEVELS):
            odds = self._base[age]
            for row in profile.rows:
                odds += row[all_ages] + row[coarse] + row[fine]
            hit = survival / (1.0 + exp(-odds))
            chances.append((hit, WIDTHS[age] * (survival - hit / 2)))
            survival -= hit
        index = [0.0] * AGES
        runs: list[tuple[float, float]] = []
        for age in range(AGES - 1, -1, -1):
            hits, time = chances[age]
            while runs and runs[-1][0] * time > hits * runs[-1][1]:
                more_hits, more_time = runs.pop()
                hits += more_hits
                time += more_time
            runs.append((hits, time))
            index[age] = hits / time if time > 0.0 else 0.0
        profile.index = index
        for ranked in profile.ranked:
            ranked.reranked()
