"""Plans of prompts for engines with states: what is loaded ends where states are stored (`.landings`), or is nothing.

Token KV behind the last of these boundaries would be of no use, for the states must be computed from the boundary on.
Where more of a prompt is stored than can be loaded, the plan names that place: another prompt has parted there from
this one, and a third one may come. Where no other is known, it names the boundary before the prompt's last message:
another question about the same text parts there. One thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmanager.extensions.states.landings import NO_STATE, STATES, LandingQuery, PlannedLanding
from kvmanager.loading.load_choice import LoadChoice, PromptChoice
from kvmanager.moves.chain_search import FoundChain
from kvmanager.moves.plan import PlannedLoad, PlanQuery
from kvmanager.moves.plan_draft import PlanDraft, PromptExtension, loads_of
from kvmanager.segments.keys import BlockHash, SegmentKey, state_name
from kvmanager.segments.spans import NodeKind


class StatePlans:
    """See the module's docstring."""

    def __init__(self, loads: LoadChoice | None) -> None:
        self._loads = loads

    def asked(self, query: PlanQuery) -> PromptExtension | None:
        """Return what is to be done for a prompt whose asker has states."""
        asked: LandingQuery | None = query.extras.get(STATES)
        return _StatefulPrompt(asked, self._loads) if asked is not None else None


class _Landing(NamedTuple):
    chain: FoundChain
    """Of the prompt up to the boundary."""
    state: FoundChain
    """Of the states there alone."""
    names: Sequence[BlockHash]
    """Of the prompt's blocks up to the boundary, and of the states."""

    @property
    def block(self) -> int:
        return len(self.names) - 1

    @property
    def goes_on(self) -> bool:
        """Whether an answer has ended there, with which the prompt goes on."""
        return self.chain.path[-1].kind is NodeKind.ANSWER

    @property
    def load(self) -> PlannedLoad:
        return loads_of(self.state, self.names)[0][0]


class _StatefulPrompt(PromptExtension):
    def __init__(self, asked: LandingQuery, loads: LoadChoice | None) -> None:
        self._asked, self._loads = asked, loads
        self._landing: _Landing | None = None
        self._stored_to = self._last = 0

    def find(self, draft: PlanDraft) -> None:
        """Let the prompt's stored chain end at its last landing; what is known beyond it is used all the same."""
        found, query = draft.found, draft.query
        tokens = max(query.prompt_tokens, len(draft.hashes) * draft.block_tokens)
        self._last = (tokens - 1) // draft.block_tokens
        self._stored_to = min(found.stored_to, self._last)
        self._landing = landing = _last_landing(draft, self._stored_to)
        path, ends, copies = landing.chain if landing is not None else FoundChain([], [], [])
        beyond = ends[-1] if ends else 0
        rest = [(node, end) for node, end in zip(found.path, found.ends, strict=True) if end > beyond]
        draft.found = FoundChain([*path, *(n for n, _ in rest)], [*ends, *(end for _, end in rest)], copies)

    def extend(self, draft: PlanDraft) -> None:
        """Bring the states of the landing, or of the last one within what is chosen of the chain; else nothing."""
        landing, chosen = self._landing, draft.reached if draft.segments else 0
        if landing is None and self._stored_to:
            draft.reason = NO_STATE
        if landing is not None and chosen < landing.block:
            landing = _last_landing(draft, chosen)
            draft.segments, draft.copies = loads_of(landing.chain, landing.names) if landing is not None else ([], [])
        block = 0
        if landing is not None:
            block = landing.block
            draft.use(landing.state)
            draft.copies = [*draft.copies, *landing.state.copies]
            if self._loads is not None and isinstance(draft.choice, PromptChoice):
                self._loads.add(draft.choice, [landing.load], 0.0)
        kept = self._kept_block()
        if block or kept:
            draft.extras[STATES] = PlannedLanding(landing.load if landing is not None else None, kept)

    def _kept_block(self) -> int:
        """Return where states are to be kept besides those at the prompt's end; 0: nowhere."""
        landing, before = self._landing, self._asked.message_block
        block = landing.block if landing is not None else 0
        if self._stored_to > block:
            return self._stored_to
        if landing is not None and landing.goes_on:
            return 0
        return before if block + max(1, self._asked.least_blocks) <= before < self._last else 0


def _last_landing(draft: PlanDraft, most_blocks: int) -> _Landing | None:
    """Return the last landing among a prompt's first blocks. O(blocks) hashes and look-ups."""
    for block in range(most_blocks, 0, -1):
        name = state_name(draft.hashes[block - 1])
        if not draft.search.knows(name):
            continue
        names = [*draft.hashes[:block], name]
        found = draft.search.find(names, draft.reader.node)
        count = len(found.copies)
        if found.stored_to == block + 1 and count and found.path[count - 1].key == SegmentKey(name):
            chain = FoundChain(found.path[: count - 1], found.ends[: count - 1], found.copies[: count - 1])
            state = FoundChain(found.path[count - 1 : count], found.ends[count - 1 : count], found.copies[count - 1 :])
            return _Landing(chain, state, names)
    return None


def build(loads: LoadChoice | None) -> StatePlans:
    """Make it. ``loads``: counts the bytes of states as under way; None: nothing does."""
    return StatePlans(loads)
