"""Plans of blended prompts: what is stored of their chunks, behind what is loaded of the prompt's own chain.

What is loaded of the own chain is the prompt's prefix, and chunks serve what comes after that. Of the chunks that end
behind it all that is stored is taken, unless a `ChunkChoice` says less. One thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmanager.extensions.blend.chunk_choice import AllChunks, ChunkChoice, MeasuredChunks, OwnPart
from kvmanager.extensions.blend.chunks import BLEND, BlendQuery, PlannedBlend, PlannedChunk, asked_blend
from kvmanager.index.nodes import Copy
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.moves.plan import PlanQuery
from kvmanager.moves.plan_draft import PlanDraft, PromptExtension, loads_of


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
