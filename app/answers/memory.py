"""Sampled answers, by the prompt that they answer: bounded in bytes, with a share for each tenant.

Invariants:

* `nbytes <= most_bytes`, with what Python's objects weigh counted in; so the number of entries is bounded too;
* a tenant that stores beyond that loses its own oldest places, unless another tenant holds more;
* a place is named by a hash over the tenant's salt and all tokens before the answer: no tenant can ask for another's.

Not safe for threads: the ingress's event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from app.gate.observed_prompt import Kind

PLACE_BYTES, TURN_BYTES = 320, 360
"""Bytes of a place and of a turn without their tokens: measured, with what a dictionary spends on each."""
ID_BYTES = 4
MOST_TURNS = 16
"""Answers remembered of one prompt: `n` of a request, or as many requests with one prompt."""


@dataclass(slots=True)
class RememberedTurn:
    """One sampled answer. `ids`: native 32-bit integers, from behind the turn's first token to the answer's end."""

    ids: bytes
    boundaries: bytes
    """The added tokens among them, in the same form."""
    kind: Kind
    text: bytes = b""
    """Digest of the text, once it was asked for."""
    rendered: bytes = b""
    """The tokens that the template's rendering has in its place, and that have the same text; empty: not seen yet."""
    returned: bool = False

    @property
    def nbytes(self) -> int:
        """With what the object weighs."""
        return TURN_BYTES + len(self.ids) + len(self.boundaries) + len(self.rendered)

    @property
    def inside(self) -> int:
        """How many added tokens there are in it."""
        return len(self.boundaries) // ID_BYTES


@dataclass(slots=True)
class Place:
    """The answers that were sampled after one sequence of tokens, oldest first."""

    turns: list[RememberedTurn] = field(default_factory=list)
    diverged: bool = False
    """A conversation has gone on here with something else, and that was counted."""
    unlike: int = 0
    """Hash of the tokens that were last seen here and have no turn's text; 0: none."""


class TenantMemory:
    """One tenant's places, by their digest, least recently used first."""

    def __init__(self) -> None:
        self.places: OrderedDict[bytes, Place] = OrderedDict()
        self.nbytes = 0

    def find(self, digest: bytes) -> Place | None:
        """The place, which is the most recently used one from now on."""
        place = self.places.get(digest)
        if place is not None:
            self.places.move_to_end(digest)
        return place


class AnswerMemory:
    """See the module's docstring."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self.forgotten = 0
        """Places that have made room for others."""
        self._tenants: dict[str, TenantMemory] = {}

    @property
    def places(self) -> int:
        """How many there are."""
        return sum(len(tenant.places) for tenant in self._tenants.values())

    def of(self, tenant: str) -> TenantMemory | None:
        """What is remembered for a tenant; None: nothing."""
        return self._tenants.get(tenant)

    def add(self, tenant: str, digest: bytes, turn: RememberedTurn) -> None:
        """Remember an answer; one that is as large as a tenth of the memory is not."""
        if turn.nbytes > self.most_bytes // 10:
            return
        own = self._tenants.setdefault(tenant, TenantMemory())
        place = own.find(digest)
        if place is None:
            place = own.places[digest] = Place()
            self._weigh(own, PLACE_BYTES)
        if any(known.ids == turn.ids for known in place.turns):
            return
        if len(place.turns) == MOST_TURNS:
            oldest = next((known for known in place.turns if not known.returned), place.turns[0])
            place.turns.remove(oldest)
            self._weigh(own, -oldest.nbytes)
        place.turns.append(turn)
        place.unlike = 0
        self._weigh(own, turn.nbytes)
        self._make_room()

    def note_rendered(self, own: TenantMemory, turn: RememberedTurn, rendered: bytes) -> None:
        """These tokens have the text of a turn, which is one of `own`."""
        self._weigh(own, len(rendered) - len(turn.rendered))
        turn.rendered = rendered
        self._make_room()

    def _make_room(self) -> None:
        while self.nbytes > self.most_bytes:
            name, largest = max(self._tenants.items(), key=lambda item: item[1].nbytes)
            _, place = largest.places.popitem(last=False)
            self._weigh(largest, -PLACE_BYTES - sum(turn.nbytes for turn in place.turns))
            self.forgotten += 1
            if not largest.places:
                del self._tenants[name]

    def _weigh(self, tenant: TenantMemory, nbytes: int) -> None:
        tenant.nbytes += nbytes
        self.nbytes += nbytes
