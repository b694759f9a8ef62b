"""Suspects for a chunk whose computation may have ended the engine: the prompts that wait for it, and its own name.

The engine's witness names the requests of the step that died. A fill's request is no client's; behind it are the
prompts that brought the chunk and wait for it, also after their clients have gone. No prompt waits for a fill in idle
time: such a chunk is known by its name alone. At most `MOST` fills are remembered, the oldest forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deployments.replica.fill_queue import ColdChunk

MOST = 1024


@dataclass(slots=True)
class _Fill:
    key: bytes
    tokens: int
    prompts: set[str] = field(default_factory=set)
    """Request ids of those that wait, or did."""


class FillSuspects:
    """See the module's docstring. On the replica's event loop, but the last three from any thread."""

    def __init__(self) -> None:
        self._fills: OrderedDict[str, _Fill] = OrderedDict()
        """By the chunk's `fill_id`."""

    def begins(self, chunk: ColdChunk, prompt: str | None = None) -> None:
        """Note a chunk that is computed, or about to be; `prompt`: id of the request that waits for it."""
        fill = self._fills.setdefault(chunk.fill_id, _Fill(chunk.key, len(chunk.token_ids)))
        if prompt is not None:
            fill.prompts.add(prompt)
        self._fills.move_to_end(chunk.fill_id)
        while len(self._fills) > MOST:
            self._fills.popitem(last=False)

    def ended_well(self, chunk: ColdChunk) -> None:
        """It has been computed, and the engine lives. Whatever else ends one leaves a suspicion."""
        self._fills.pop(chunk.fill_id, None)

    def with_prompts(self, suspects: Sequence[str] | None) -> Sequence[str] | None:
        """The suspects of an engine's death, with the prompts that waited for the fills among them in their place.

        What those bring may have ended the engine. Prompts that waited for other fills have nothing to do with it.
        """
        if suspects is None:
            return None
        behind = {name: fill.prompts for name, fill in self._named(suspects) if fill.prompts}
        prompts = {prompt for waiting in behind.values() for prompt in waiting}
        return [*(name for name in suspects if name not in behind), *sorted(prompts)]

    def blamed(self, suspects: Sequence[str] | None) -> list[bytes] | None:
        """The names of the chunks among the suspects; None where there is no witness."""
        return None if suspects is None else [fill.key for _, fill in self._named(suspects)]

    def in_words(self, suspects: Sequence[str] | None) -> str:
        """The chunks among the suspects, for a log; empty where there are none."""
        named = [f"{fill.key.hex()[:16]} ({fill.tokens} tokens)" for _, fill in self._named(suspects or ())]
        return ", ".join(named)

    def _named(self, suspects: Sequence[str]) -> Iterator[tuple[str, _Fill]]:
        for name in suspects:
            for fill_id, fill in list(self._fills.items()):
                if name.startswith(fill_id):
                    yield name, fill
