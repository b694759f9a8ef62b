"""How many tokens of a prompt must be reused, and from which tier, given the turns that were sent before.

A turn computes the KV of its prompt and of its answer without the last token, which the model has not read yet. Whole
blocks of that are reused, and never a prompt's last token: `(prompt_tokens - 1) // block` blocks at most.

A device serves block by block. The CPU tier and Redis store segments of several blocks, cut where a turn's prompt and
its answer end, and give whole segments only; so a turn's prompt, or its prompt with the answer, counts here only where
the new prompt begins with all of it. The script keeps to that: where a new question branches off, the branch is on the
device. Each segment comes from the nearest tier that has it, and of one that begins inside what a nearer tier gives,
only the rest counts.

The CPU tier has what was saved as soon as `lookup` says so, and so has Redis, to which it is copied some time later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TokensBySource:
    """Where a prompt's KV came from, in tokens; the four add up to the prompt's length."""

    device: int = 0
    cpu: int = 0
    redis: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """The prompt's length."""
        return sum(asdict(self).values())

    @property
    def reused(self) -> int:
        """Tokens that were not computed again."""
        return self.total - self.recomputed

    def __str__(self) -> str:
        return ", ".join(f"{tokens} {source}" for source, tokens in asdict(self).items() if tokens)


class KnownKV:
    """What the server must have after the turns so far: on each replica's device, in the CPU tier, and in Redis."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size = block_size_tokens
        self._devices: dict[int, list[list[int]]] = {}
        self._cpu: list[list[int]] = []
        self._redis: list[list[int]] = []

    def add_turn(self, replica: int, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """A replica has answered. Returns the tokens whose KV it has now: whole blocks, which the CPU tier gets too.

        The CPU tier gets them from the replica, or, if they came from Redis, on that way.
        """
        computed = self._whole_blocks([*prompt, *answer[:-1]])
        self._devices.setdefault(replica, []).append(computed)
        self._cpu += [self._whole_blocks(prompt), computed]
        return computed

    def copied_to_redis(self, computed: Sequence[int]) -> None:
        """Redis has all of what `add_turn` returned, so also the turn's prompt and what the turn began with."""
        self._redis += [saved for saved in self._cpu if _common(saved, computed) == len(saved)]

    def clear(self, *tiers: str) -> None:
        """All tiers of these kinds (`device`, `cpu`, `redis`) were emptied, on all replicas and nodes."""
        if "device" in tiers:
            self._devices.clear()
        if "cpu" in tiers:
            self._cpu.clear()
        if "redis" in tiers:
            self._redis.clear()

    def blocks(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """Whole blocks that a turn computes."""
        return len(self._whole_blocks([*prompt, *answer[:-1]])) // self.block_size

    def expected(self, replica: int, prompt: Sequence[int]) -> TokensBySource:
        """What a turn with this prompt must report, when everything so far has been saved."""
        most = (len(prompt) - 1) // self.block_size
        shared = [_common(prompt, sequence) // self.block_size for sequence in self._devices.get(replica, [])]
        device = min(max(shared, default=0), most)
        with_cpu = max(device, min(self._contained(prompt, self._cpu), most))
        with_redis = max(with_cpu, min(self._contained(prompt, self._redis), most))
        return TokensBySource(
            device=device * self.block_size,
            cpu=(with_cpu - device) * self.block_size,
            redis=(with_redis - with_cpu) * self.block_size,
            recomputed=len(prompt) - with_redis * self.block_size,
        )

    def _contained(self, prompt: Sequence[int], saved: list[list[int]]) -> int:
        """Blocks of the longest saved sequence that the prompt begins with."""
        whole = [len(sequence) for sequence in saved if _common(prompt, sequence) == len(sequence)]
        return max(whole, default=0) // self.block_size

    def _whole_blocks(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens[: len(tokens) // self.block_size * self.block_size])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
