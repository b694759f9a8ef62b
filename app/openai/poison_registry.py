"""Which prompts may have ended an engine, and which of them are tried again.

An engine dies with all its requests, and the culprit is among them. The dying engine's *crash report* names those that
it was prefilling in its last step, or, when it prefilled nothing, all that it computed then
(`deployments.engine.crash_report`); a process that is killed leaves none. A prompt is known by a digest of its tokens
and its cache salt, which holds the tenant: no tenant can have another one's prompt refused. Sampling parameters are
left out, so that a client which sends the same prompt under a new seed is known too.

Invariants:

* a prompt that a crash report names alone is guilty at once: it gets no second engine, and is refused for `refuse_s`;
  not so an attempt that has answered, which goes on elsewhere: most deaths in mid-answer are the engine's own. It stays
  charged, whatever it answers there: the second engine that ends with it alone is the last;
* a prompt that was a suspect of two deaths is guilty, whatever the witnesses; so no prompt is named by three;
* the suspects of one death are tried again one after another, the plainest first, and each until it has given an
  output, has ended, or has lived for `TRIAL_S`; when all of them but one are cleared that one is guilty untried, unless
  it has answered;
* when one is found guilty, those that waited with it are no longer suspects, and go at once;
* a prompt that is no suspect by a crash report, or was in a process that was ended on purpose, is never charged;
* memory: at most `MOST` prompts and `MOST_DEATHS` deaths are remembered, the oldest forgotten first, each for
  `refuse_s` at most. O(suspects of a death) per call.

One engine is lost for a prompt that the crash report names alone before it has answered, or whose fellow suspects are
cleared first; otherwise two at most. Pure; one thread, or one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

Digest = bytes

REFUSED_S = 600.0
"""How long a prompt is refused that has ended an engine, or that was in two that ended."""
SETTLE_S = 0.1
"""From a death to the first new trial: by then all that were in the engine have said so."""
TRIAL_S = 2.0
"""A suspect that has given nothing for this time, and lives, no longer keeps the next one waiting."""
MOST = 4096
MOST_DEATHS = 64


class Verdict(Enum):
    """What becomes of a prompt whose replica has died."""

    BYSTANDER = "bystander"
    SUSPECT = "suspect"
    GUILTY = "guilty"


class Turn(Enum):
    """Whether a prompt may be sent now."""

    GO = "go"
    WAIT = "wait"
    GUILTY = "guilty"


@dataclass(slots=True)
class _Death:
    """Of one replica. `named`: the prompts that the crash report names; None without a crash report."""

    at: float
    named: frozenset[Digest] | None = None
    waiting: dict[Digest, tuple[int, int]] = field(default_factory=dict)
    """Suspects to be tried, with how odd each is."""
    told: frozenset[Digest] = frozenset()
    """Of the named, those that had answered."""
    cleared: set[Digest] = field(default_factory=set)
    on_trial: Digest | None = None
    tried_at: float = 0.0
    solved: bool = False


class PoisonRegistry:
    """See the module's docstring. Times are seconds of one clock that does not jump."""

    def __init__(self, refuse_s: float) -> None:
        """`refuse_s`: how long a guilty prompt is refused, and a suspicion lasts."""
        self._refuse_s = refuse_s
        self._live: dict[str, Digest] = {}
        self._left: OrderedDict[str, Digest] = OrderedDict()
        """Attempts that are over, which a crash report may still name: clients may leave before their engine dies."""
        self._told: set[str] = set()
        """Of both, those that have answered."""
        self._charges: OrderedDict[Digest, tuple[float, frozenset[str]]] = OrderedDict()
        """Prompt -> when it was last charged, and the deaths that it is a suspect of."""
        self._guilty_until: OrderedDict[Digest, float] = OrderedDict()
        self._deaths: OrderedDict[str, _Death] = OrderedDict()
        self._line_of: dict[Digest, str] = {}
        """Prompts that wait for a trial, or are on one, and the death it is for."""

    def refused_s(self, digest: Digest, now: float) -> float:
        """For how long a prompt is still refused; 0: it is not."""
        return max(0.0, self._guilty_until.get(digest, now) - now)

    def turn(self, digest: Digest, oddness: tuple[int, int], now: float) -> Turn:
        """Whether the prompt may be sent now. Ask again after a while when it must wait; `sent` follows a `GO`."""
        if self.refused_s(digest, now):
            return Turn.GUILTY
        death = self._deaths.get(self._line_of.get(digest, ""))
        if death is None or death.solved:
            self._line_of.pop(digest, None)
            return Turn.GO
        if death.on_trial == digest:
            return Turn.WAIT if now - death.tried_at < TRIAL_S else Turn.GO  # another copy of it is being tried
        death.waiting.setdefault(digest, oddness)
        if now - death.at < SETTLE_S or (death.on_trial is not None and now - death.tried_at < TRIAL_S):
            return Turn.WAIT
        if digest != min(death.waiting, key=lambda waiting: (death.waiting[waiting], waiting)):
            return Turn.WAIT
        named = death.named or frozenset()
        if len(named) > 1 and named - death.cleared == {digest} and digest not in death.told:
            self._condemn(digest, now)
            return Turn.GUILTY
        del death.waiting[digest]
        death.on_trial, death.tried_at = digest, now
        return Turn.GO

    def leave(self, digest: Digest) -> None:
        """Stop waiting for this prompt's turn."""
        death = self._deaths.get(self._line_of.get(digest, ""))
        if death is not None:
            death.waiting.pop(digest, None)

    def sent(self, request_id: str, digest: Digest) -> None:
        """An attempt at a prompt begins; `ended` must follow."""
        self._live[request_id] = digest

    def told(self, request_id: str) -> None:
        """The attempt has given its first output."""
        if request_id in self._live:
            self._told.add(request_id)

    def ended(self, request_id: str) -> None:
        """The attempt is over, in whatever way."""
        digest = self._live.pop(request_id, None)
        if digest is None:
            return
        self._left[request_id] = digest
        while len(self._left) > MOST:
            self._told.discard(self._left.popitem(last=False)[0])
        death = self._deaths.get(self._line_of.get(digest, ""))
        if death is not None and death.on_trial == digest:
            # It gave nothing and did not die: its client has left, or it was refused. It stays charged.
            death.on_trial = None
            del self._line_of[digest]

    def cleared(self, digest: Digest) -> None:
        """The prompt has given an output: the death that it is on trial for was not its doing. O(1) for others."""
        name = self._line_of.pop(digest, None)
        if name is None:
            return
        death = self._deaths.get(name)
        if death is None or death.named != {digest}:  # a prompt alone in a step that ended an engine stays charged
            self._acquit(digest, name)
        if death is not None:
            death.cleared.add(digest)
            if death.on_trial == digest:
                death.on_trial = None

    def died(self, request_id: str, replica: str, crash_report: Iterable[str] | None, now: float) -> Verdict:
        """An attempt ended with its replica. `crash_report`: the ids that its engine names; None: there is none."""
        digest = self._live[request_id]
        death = self._death(replica, now)
        if crash_report is not None and death.named is None:
            self._hear(death, replica, crash_report, now)
        if self.refused_s(digest, now):
            return Verdict.GUILTY
        if death.solved or (death.named is not None and digest not in death.named):
            return Verdict.BYSTANDER
        if death.named is None:
            earlier = self._deaths.get(self._line_of.get(digest, ""))
            if earlier is not None and earlier.on_trial not in (None, digest):
                return Verdict.BYSTANDER  # it lives since its own trial: the one that is on trial now has done this too
            if self._charge(digest, replica, now) >= 2:
                self._condemn(digest, now)
                return Verdict.GUILTY
        self._line_of[digest] = replica
        return Verdict.SUSPECT

    def _hear(self, death: _Death, replica: str, crash_report: Iterable[str], now: float) -> None:
        """Charge all that the crash report names, also those whose clients have left: they may come again."""
        digests = {name: self._live.get(name) or self._left.get(name) or name.encode() for name in crash_report}
        named = death.named = frozenset(digests.values())
        death.told = named - {digest for name, digest in digests.items() if name not in self._told}
        for digest in named:
            if self._charge(digest, replica, now) >= 2 or (len(named) == 1 and digest not in death.told):
                self._condemn(digest, now)

    def _death(self, replica: str, now: float) -> _Death:
        self._forget_old(now)
        death = self._deaths.get(replica)
        if death is None:
            death = self._deaths[replica] = _Death(now)
            while len(self._deaths) > MOST_DEATHS:
                self._forget_oldest_death()
        return death

    def _charge(self, digest: Digest, replica: str, now: float) -> int:
        """Note a suspicion; how many deaths the prompt is a suspect of."""
        _, replicas = self._charges.pop(digest, (now, frozenset[str]()))
        replicas |= {replica}
        self._charges[digest] = now, replicas
        while len(self._charges) > MOST:
            self._charges.popitem(last=False)
        return len(replicas)

    def _acquit(self, digest: Digest, replica: str) -> None:
        at, replicas = self._charges.get(digest, (0.0, frozenset[str]()))
        if replicas - {replica}:
            self._charges[digest] = at, replicas - {replica}
        else:
            self._charges.pop(digest, None)

    def _condemn(self, digest: Digest, now: float) -> None:
        """Refuse it from now on, and let go who is a suspect only because it was there."""
        self._guilty_until.pop(digest, None)
        self._guilty_until[digest] = now + self._refuse_s
        while len(self._guilty_until) > MOST:
            self._guilty_until.popitem(last=False)
        _, replicas = self._charges.pop(digest, (now, frozenset[str]()))
        line = self._line_of.pop(digest, None)
        for replica in replicas | ({line} if line else set()):
            death = self._deaths.get(replica)
            if death is None:
                continue
            death.solved = True
            for other in (death.named or frozenset()) | {o for o, name in self._line_of.items() if name == replica}:
                if self._line_of.get(other) == replica:
                    del self._line_of[other]
                self._acquit(other, replica)

    def _forget_old(self, now: float) -> None:
        while self._charges and now - next(iter(self._charges.values()))[0] > self._refuse_s:
            self._charges.popitem(last=False)
        while self._deaths and now - next(iter(self._deaths.values())).at > self._refuse_s:
            self._forget_oldest_death()
        while self._guilty_until and next(iter(self._guilty_until.values())) <= now:
            self._guilty_until.popitem(last=False)

    def _forget_oldest_death(self) -> None:
        name, _ = self._deaths.popitem(last=False)
        self._line_of = {digest: line for digest, line in self._line_of.items() if line != name}
