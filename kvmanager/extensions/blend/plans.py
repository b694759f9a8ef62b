"""Plans of blended prompts: what is stored of their chunks, behind what is loaded of the prompt's own chain.

What is loaded of the own chain is the prompt's prefix, and chunks serve what comes after that. Of the chunks that end
behind it all that is stored is taken, unless a `ChunkChoice` says less: by measured rates, all that serve or none
(`kvmanager.extensions.blend.blend_choice`). One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvmanager.extensions.blend.blend_choice import BlendChoice, BlendedPrompt, Judgement, blend_of
from kvmanager.extensions.blend.chunks import BLEND, BLENDS, BlendQuery, PlannedBlend, PlannedChunk, asked_blend
from kvmanager.index.nodes import Copy
from kvmanager.loading.load_choice import LoadChoice, LoadMode, PromptChoice
from kvmanager.moves.plan import PlanQuery, PlanReason
from kvmanager.moves.plan_draft import PlanChoice, PlanDraft, PromptExtension, loads_of

_NOTHING_STORED = (PlanReason.COLD, PlanReason.EVICTED)


class OwnPart(NamedTuple):
    """What a plan brings of a prompt's own chain: its leading blocks, and why."""

    blocks: int
    reason: str


class ChosenChunks(NamedTuple):
    """Which chunks are blended, and why, or why none."""

    chunks: Sequence[PlannedChunk]
    reason: str
    seconds: float = 0.0
    """How long the blend should take, by the rates of prefills and loads alone; 0: not known."""


class ChunkChoice(Protocol):
    """Decides for one prompt which of its stored chunks are blended."""

    def choose(
        self, choice: PlanChoice, query: BlendQuery, own: OwnPart, chunks: Sequence[PlannedChunk]
    ) -> ChosenChunks:
        """Return which of ``chunks``, not none, to blend behind ``own``. ``choice`` has chosen of the own chain."""
        ...


class AllChunks:
    """The choice of all that is stored."""

    def choose(
        self, choice: PlanChoice, query: BlendQuery, own: OwnPart, chunks: Sequence[PlannedChunk]
    ) -> ChosenChunks:
        """Return all."""
        return ChosenChunks(chunks, BLENDS)


class MeasuredChunks:
    """The choice by the rates of a `LoadChoice`, from which it hears how long blends took. One thread."""

    def __init__(self, loads: LoadChoice) -> None:
        self._loads = loads
        self._blends = BlendChoice(loads.mode is LoadMode.LOAD, loads.rates, loads.under_way)
        loads.hear(BLEND, self._blends.correction)

    def choose(
        self, choice: PlanChoice, query: BlendQuery, own: OwnPart, chunks: Sequence[PlannedChunk]
    ) -> ChosenChunks:
        """See `ChunkChoice.choose`: all that serve or none. A choice of another kind than `PromptChoice` takes all."""
        if not isinstance(choice, PromptChoice):
            return ChosenChunks(chunks, BLENDS)
        loads, block_tokens, reason = self._loads, self._loads.block_tokens, own.reason
        start = max(choice.device_tokens, own.blocks * block_tokens)
        chunks = [c for c in chunks if c.start_token + c.blocks * block_tokens > start]
        if not chunks or reason is PlanReason.PROBE:
            return ChosenChunks((), reason)  # a probe measures what a blend would hide
        if loads.mode is LoadMode.RECOMPUTE:
            return ChosenChunks((), PlanReason.RECOMPUTE_ALWAYS if reason in _NOTHING_STORED else reason)
        stored = [(chunk.start_token, chunk.blocks * block_tokens) for chunk in chunks]
        segments = [load for chunk in chunks for load in chunk.loads]
        loads.note_ahead(choice, segments)
        blend = blend_of(stored, range(start, choice.prompt_tokens), block_tokens, query.ratio, query.terms)
        prompt = BlendedPrompt(
            choice.now, choice.replica, choice.prompt_tokens, choice.ahead, choice.load_s, loads.queue_s(choice)
        )
        judged = self._blends.judge(prompt, blend, chunks)
        if not judged.blends:
            return ChosenChunks((), judged.reason if reason in _NOTHING_STORED else reason)
        if not judged.blend_s and loads.mode is LoadMode.AUTO and loads.computing_is_due():
            return ChosenChunks((), PlanReason.PROBE if reason in _NOTHING_STORED else reason)
        if loads.mode is LoadMode.AUTO and not choice.loads and self._hides_prefills(choice, judged):
            return ChosenChunks((), PlanReason.PROBE)
        choice.load_s = judged.first_token_s
        # Chunks are read while the blend's first layers are computed, so they stay for as long as it takes. No other
        # load waits for these bytes, which do not go to the device.
        loads.add(choice, segments, judged.blend_s)
        return ChosenChunks(chunks, BLENDS, judged.blend_s)

    def _hides_prefills(self, choice: PromptChoice, judged: Judgement) -> bool:
        """Whether to compute a prompt instead of a blend that is little sooner: no blend measures prefills."""
        queue_s = self._loads.queue_s(choice)
        own_s, without_s = (seconds - queue_s for seconds in (judged.first_token_s, judged.without_s))
        return judged.blend_s > 0 and self._loads.probes.computing_is_due(choice.replica, own_s, without_s)


class BlendPlans:
    """See the module's docstring."""

    def __init__(self, choice: ChunkChoice) -> None:
        self._choice = choice

    def asked(self, query: PlanQuery) -> PromptExtension | None:
        """Return what is to be done for a prompt whose asker names chunks."""
        asked = asked_blend(query)
        return None if asked is None else _BlendedPrompt(asked, self._choice)


class _StoredChunk(NamedTuple):
    part: PlannedChunk
    copies: list[Copy]


class _BlendedPrompt(PromptExtension):
    def __init__(self, query: BlendQuery, choice: ChunkChoice) -> None:
        self._query = query
        self._choice = choice

    def extend(self, draft: PlanDraft) -> None:
        """Blend the chunks that are worth it, behind what is brought of the prompt's own chain."""
        query, reached = self._query, draft.reached
        stored = self._find_chunks(draft, max(draft.device_blocks, draft.found.stored_to), reached)
        if not stored:
            return
        own = OwnPart(reached, draft.reason)
        chosen = self._choice.choose(draft.choice, query, own, [each.part for each in stored])
        draft.reason = chosen.reason
        if chosen.chunks:
            _bring(draft, chosen.chunks, stored, reached)
            terms = query.ratio, query.terms.check_layer, chosen.seconds
            draft.extras[BLEND] = PlannedBlend(tuple(chosen.chunks), *terms)

    def _find_chunks(self, draft: PlanDraft, stored_blocks: int, reached: int) -> list[_StoredChunk]:
        """Return what is stored of chunks behind ``reached`` blocks of a prompt; count the uses.

        ``stored_blocks``: leading blocks of the prompt that are stored as its own, loaded or not.
        """
        counters, block_tokens, chunks = draft.counters, draft.block_tokens, self._query.chunks
        own, loaded = stored_blocks * block_tokens, reached * block_tokens
        stored: list[_StoredChunk] = []
        end = 0
        for chunk in chunks:
            if chunk.start_token < end:
                continue  # it overlaps the one before it
            end = chunk.start_token + chunk.tokens
            found_tokens = min(max(0, own - chunk.start_token), chunk.tokens)
            if end > loaded:
                found = draft.search.find(chunk.hashes, draft.reader.node)
                draft.use(found)
                tokens = found.stored_to * block_tokens
                found_tokens = max(found_tokens, tokens)
                if tokens and chunk.start_token + tokens > loaded:
                    segments, copies = loads_of(found, chunk.hashes)
                    stored.append(_StoredChunk(PlannedChunk(chunk.start_token, tuple(segments)), copies))
            if len(chunks) > 1:
                counters.chunk_tokens_asked += chunk.tokens
                counters.chunk_tokens_found += found_tokens
        return stored


def _bring(draft: PlanDraft, parts: Sequence[PlannedChunk], stored: Sequence[_StoredChunk], reached: int) -> None:
    """Lease the copies of the chunks that are blended behind ``reached`` blocks; count what they bring."""
    copies_of = {each.part.start_token: each.copies for each in stored}
    for part in parts:
        skipped = max(0, reached * draft.block_tokens - part.start_token) // draft.block_tokens
        draft.bring(part.loads, copies_of[part.start_token], skipped)


def build(loads: LoadChoice | None) -> BlendPlans:
    """Make it. ``loads``: judges by rates; None: all chunks are blended."""
    return BlendPlans(AllChunks() if loads is None else MeasuredChunks(loads))
