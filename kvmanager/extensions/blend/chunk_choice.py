"""Which stored chunks of a prompt are blended: all, or what `blend_choice` says by measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvmanager.extensions.blend.blend_choice import BlendChoice, BlendedPrompt, Judgement, blend_of
from kvmanager.extensions.blend.chunks import BLEND, BLENDS, BlendQuery, PlannedChunk
from kvmanager.loading.load_choice import LoadChoice, LoadMode, PromptChoice
from kvmanager.moves.plan import PlanReason
from kvmanager.moves.plan_draft import PlanChoice

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
