"""How long an answer will be, from the answers to earlier prompts that begin alike.

Prompts that share a prefix have answers of similar length: the next turn of a conversation, the same task on another
document. So the prompt's chain of block hashes is a path in a trie of earlier answers. A *node* there holds a decayed
mean of log2 of the lengths, less what the prompt's own length let expect (its *prior*). An estimate is the prior plus
what the nodes of the path add, read from the root down: each is shrunk towards its parent, as it saw fewer answers.
Nodes hold differences from the prior, so that a node which all prompts share, a system prompt's, does not hide it.

Invariants:

* nodes stand at the ends of segments and at a prompt's last two full blocks, so a request costs O(its segments);
* no more than ``most_nodes`` nodes are kept, some 320 bytes each; the node written longest ago goes first, and children
  go before their parents;
* an answer that was cut off (``max_tokens``) is a lower bound: it lengthens an estimate, and never shortens it.

One of these for each tenant: nothing in it is shared, so no tenant's answers can be told from another's estimates.
After *Sequence Scheduling* (arXiv 2305.13144), *Efficient LLM Scheduling by Learning to Rank* (arXiv 2408.15792): what
an order needs is the rank. Pure, no clock; one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp2, log2

FIRST_GUESS = 8.0
"""log2 of an answer's tokens before anything is known: 256 tokens."""
PARENT_WEIGHT = 1.0
"""Answers that a node must have seen to count as much as its parent."""
_GUESS_WEIGHT = 2.0
_ALL_WEIGHT = 20.0
"""Of all answers, against those to prompts of about the same length."""
_NODE_KEEP, _BUCKET_KEEP, _ALL_KEEP = 0.98, 0.995, 0.999
"""What an answer's weight is multiplied by with each later one: means of the last 50, 200 and 1,000."""
_BUCKETS_PER_DOUBLING = 2
_LAST_BLOCKS = 2
_LONGEST = 40.0
"""log2; no estimate is beyond it."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """What is expected of one prompt. ``prior``, ``log2_tokens``: log2 of tokens, of an answer that is not cut off."""

    prior: float
    log2_tokens: float
    known_blocks: int = 0
    """Leading full blocks of the prompt that the path knows: it has been computed before."""

    @property
    def tokens(self) -> int:
        """At least 1."""
        return max(1, round(exp2(min(self.log2_tokens, _LONGEST))))


class _Mean:
    """A decayed mean: the sum of weights, and of weighted values."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.total = 0.0

    def add(self, value: float, keep: float) -> None:
        self.weight = self.weight * keep + 1.0
        self.total = self.total * keep + value

    def shrunk(self, towards: float, weight: float) -> float:
        return (self.total + weight * towards) / (self.weight + weight)


class AnswerLengths:
    """See the module's docstring."""

    def __init__(self, blocks_per_segment: int, most_nodes: int) -> None:
        """Raises ValueError for a number below 1."""
        if blocks_per_segment < 1 or most_nodes < 1:
            raise ValueError(f"a segment and a trie hold at least one, got {blocks_per_segment} and {most_nodes}")
        self._segment = blocks_per_segment
        self._most_nodes = most_nodes
        self._all = _Mean()
        self._buckets: dict[int, _Mean] = {}
        self._nodes: OrderedDict[bytes, _Mean] = OrderedDict()

    def __len__(self) -> int:
        """Nodes."""
        return len(self._nodes)

    def prior(self, prompt_tokens: int) -> float:
        """Return log2 of the answer's tokens, judged by the prompt's length alone. O(1)."""
        bucket, general = self._buckets.get(_bucket(prompt_tokens)), self._all.shrunk(FIRST_GUESS, _GUESS_WEIGHT)
        return general if bucket is None else bucket.shrunk(general, _ALL_WEIGHT)

    def estimate(self, hashes: Sequence[bytes], prompt_tokens: int) -> LengthEstimate:
        """Return what to expect of a prompt of ``prompt_tokens`` with the full blocks ``hashes``. O(segments)."""
        prior, known, beyond_prior = self.prior(prompt_tokens), 0, 0.0
        for end in self._path(hashes):
            node = self._nodes.get(hashes[end - 1])
            if node is not None:
                beyond_prior = node.shrunk(beyond_prior, PARENT_WEIGHT)
                known = end
        return LengthEstimate(prior, prior + beyond_prior, known)

    def learn(
        self,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        estimate: LengthEstimate,
        answer_tokens: float,
        cut_off: bool = False,
    ) -> None:
        """An answer has ended by itself, or was ``cut_off`` at its longest. O(segments).

        ``estimate``: what was said before it began.
        """
        length = log2(max(1.0, answer_tokens))
        if cut_off:
            length = max(length, estimate.log2_tokens)
        self._all.add(length, _ALL_KEEP)
        self._buckets.setdefault(_bucket(prompt_tokens), _Mean()).add(length, _BUCKET_KEEP)
        for end in sorted(self._written(len(hashes)), reverse=True):  # so that parents are younger than their children
            node = self._nodes.setdefault(hashes[end - 1], _Mean())
            node.add(length - estimate.prior, _NODE_KEEP)
            self._nodes.move_to_end(hashes[end - 1])
        while len(self._nodes) > self._most_nodes:
            self._nodes.popitem(last=False)

    def _written(self, blocks: int) -> set[int]:
        """Where the nodes of a prompt stand, in blocks up to there; no more than there may be, the first ones."""
        ends = set(range(self._segment, blocks + 1, self._segment))
        ends.update(range(max(1, blocks - _LAST_BLOCKS + 1), blocks + 1))
        return ends if len(ends) <= self._most_nodes else set(sorted(ends)[: self._most_nodes])

    def _path(self, hashes: Sequence[bytes]) -> Iterator[int]:
        """Where nodes of the prompt may stand, from the root down, to the first segment whose end has none.

        In that one each block is looked at: an earlier prompt may have ended there.
        """
        end = 0
        while (end := end + self._segment) <= len(hashes) and hashes[end - 1] in self._nodes:
            yield end
        yield from range(end - self._segment + 1, min(end, len(hashes)) + 1)


def _bucket(prompt_tokens: int) -> int:
    return int(_BUCKETS_PER_DOUBLING * log2(max(1, prompt_tokens)))
