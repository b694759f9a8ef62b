"""Streaming a long context's KV over a link that varies: which form of each chunk to take so that a TTFT target holds.

CacheGen's streaming adaptation (SIGCOMM'24, arXiv 2310.07240, §5.3 and its Algorithm 1): the context is cut in chunks,
each of which can come at one of several levels of compression or be recomputed. Before each chunk, what the last one
got of the link is taken for what the others will get; of the forms with which all that is left would be there in time,
the one that loses least is taken for the next chunk. With no measurement yet, the middle level is.

Three things are decided here that the paper leaves open:

* Within a bound on loss, every chunk counts with its fastest form, so that a few chunks may be recomputed, or come
  without loss, among others that are loaded at a level.
* When nothing is expected to be in time, every chunk takes its fastest form: the target is missed by least.
* ``prepared_for`` < 1 also asks that the target could still be met if the link fell to that share of what it is, by
  the fastest forms, and hurries until it could. 1 is the paper's rule.

Chunks are got one after the other, as one link and one engine do. `PrefixLoad` is what of this an engine can use in
which all that follows a computed chunk is computed. Pure: times are seconds that the caller measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

RECOMPUTE = -1
"""A chunk's form: not loaded at all. Loses nothing."""
LOSSLESS = 0
"""Level 0; a higher level is smaller and loses more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive tokens of the context."""

    level_bytes: Mapping[int, int]
    """What is stored, or could be encoded in time: bytes by level."""
    recompute_s: float = inf
    """Time of computing it, everything before it being there; infinite where that cannot be done."""

    def seconds(self, form: int, bytes_per_s: float) -> float:
        """Return the time until the chunk is there in a form, `RECOMPUTE` or a level that it has."""
        return self.recompute_s if form == RECOMPUTE else self.level_bytes[form] / bytes_per_s

    def fastest(self, most_loss: float, bytes_per_s: float) -> tuple[float, int]:
        """Return the shortest time and its form among those up to level ``most_loss``; of equals the less lossy."""
        least_s, best = self.recompute_s, RECOMPUTE
        for level, nbytes in self.level_bytes.items():
            if level <= most_loss and (
                nbytes < least_s * bytes_per_s or (best > level and nbytes == least_s * bytes_per_s)
            ):
                least_s, best = nbytes / bytes_per_s, level
        return least_s, best


def choose(chunks: Sequence[Chunk], left_s: float, bytes_per_s: float | None, prepared_for: float = 1.0) -> int:
    """Return the form in which to get the first of ``chunks``, which are all that is still to be got in ``left_s``.

    ``bytes_per_s``: what the last chunk got of the link; None when nothing has been measured. O(chunks · levels).
    """
    levels = sorted({level for chunk in chunks for level in chunk.level_bytes})
    if bytes_per_s is None:
        known = sorted(chunks[0].level_bytes)
        return known[len(known) // 2] if known else RECOMPUTE
    slow = bytes_per_s * prepared_for
    spare_s = left_s - sum(chunk.fastest(inf, slow)[0] for chunk in chunks[1:])
    for most_loss in levels or [LOSSLESS]:
        if sum(chunk.fastest(most_loss, bytes_per_s)[0] for chunk in chunks) <= left_s:
            form = chunks[0].fastest(most_loss, bytes_per_s)[1]
            if chunks[0].seconds(form, slow) <= spare_s:
                return form
    return chunks[0].fastest(inf, bytes_per_s)[1]


def leading_chunks_to_load(chunks: Sequence[Chunk], left_s: float, bytes_per_s: float) -> int:
    """Return how many of ``chunks`` to load, for an engine in which all that follows a computed chunk is computed.

    Each has one stored form. All of them if they are expected to be there in ``left_s``; otherwise as many as are
    expected to take the least time together with computing the others, of equals the fewest. O(chunks).
    """
    loads = [min(chunk.level_bytes.values()) / bytes_per_s for chunk in chunks]
    if sum(loads) <= left_s:
        return len(chunks)
    took_s = least_s = sum(chunk.recompute_s for chunk in chunks)
    best = 0
    for number, (chunk, load_s) in enumerate(zip(chunks, loads, strict=True), start=1):
        took_s += load_s - chunk.recompute_s
        if took_s < least_s:
            best, least_s = number, took_s
    return best


class Stream:
    """One context on its way, from the moment when its request came. One thread."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        target_s: float,
        bytes_per_s: float | None = None,
        prepared_for: float = 1.0,
    ) -> None:
        """``target_s``: when all chunks shall be there. ``bytes_per_s``: what the link gave lately, if known."""
        self.forms: list[int] = []
        """What was chosen so far."""
        self._chunks = chunks
        self._target_s = target_s
        self._bytes_per_s = bytes_per_s
        self._prepared_for = prepared_for

    def next_form(self, elapsed_s: float) -> int | None:
        """Return the form in which to get the next chunk now; None when all have been chosen."""
        rest = self._chunks[len(self.forms) :]
        if not rest:
            return None
        self.forms.append(choose(rest, self._target_s - elapsed_s, self._bytes_per_s, self._prepared_for))
        return self.forms[-1]

    def arrived(self, nbytes: int, seconds: float) -> None:
        """Note what the link did for the last chunk, if that was loaded."""
        if nbytes > 0 and seconds > 0:
            self._bytes_per_s = nbytes / seconds


class PrefixLoad:
    """A load under way against a target, for an engine in which all that follows a computed chunk is computed.

    Every chunk has one stored form, so the choice at each is whether to wait for it. Times are on the caller's clock.
    One thread at a time.
    """

    def __init__(self, chunks: Sequence[Chunk], rest_s: float, now: float, target_at: float) -> None:
        """``rest_s``: computing what follows the chunks, which are asked for ``now``."""
        self._chunks = chunks
        self._rest_s = rest_s
        self._began = now
        self._target_at = target_at
        self._arrived = 0
        self._bytes = 0

    @property
    def give_up_at(self) -> float:
        """Until when to wait for a chunk: what is left by then can still be computed before the target.

        Without end where even computing everything at once would miss it: then only loading can help.
        """
        last = self._target_at - self._rest_s - sum(chunk.recompute_s for chunk in self._chunks)
        return last if last > self._began else inf

    def arrived(self, now: float) -> bool:
        """Note that the next chunk is there; return whether to wait for the one after it."""
        self._bytes += min(self._chunks[self._arrived].level_bytes.values())
        self._arrived += 1
        rest = self._chunks[self._arrived :]
        bytes_per_s = self._bytes / max(now - self._began, 1e-6)
        return leading_chunks_to_load(rest, self._target_at - now - self._rest_s, bytes_per_s) > 0
