"""How many tokens of a prompt must be reused, and from which tier, given the turns that were sent before.

What a turn computes is the KV of its prompt and of its answer but for the last token, which nobody has read yet. Whole
blocks of that are reused, and never a prompt's last token: `(prompt_tokens - 1) // block` blocks at most.

A device serves block by block. The CPU tier stores segments of several blocks, cut where a turn's prompt and its answer
end, and gives whole segments only; so a turn's prompt, or its prompt with the answer, counts here only where the new
prompt begins with all of it. The script keeps to that: where a new question branches off, the branch is on the device.
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
    """What the server must have after the turns so far: on each replica's device, and in the shared CPU tier."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size = block_size_tokens
        self._devices: dict[int, list[list[int]]] = {}
        self._saved: list[list[int]] = []

    def add_turn(self, replica: int, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """A replica has answered. Returns the tokens whose KV it has computed: whole blocks, which it saves too."""
        computed = self._whole_blocks([*prompt, *answer[:-1]])
        self._devices.setdefault(replica, []).append(computed)
        self._saved += [self._whole_blocks(prompt), computed]
        return computed

    def blocks(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """Whole blocks that a turn computes."""
        return len(self._whole_blocks([*prompt, *answer[:-1]])) // self.block_size

    def clear_devices(self) -> None:
        """All device tiers were emptied; the CPU tier was not."""
        self._devices.clear()

    def expected(self, replica: int, prompt: Sequence[int]) -> TokensBySource:
        """What a turn with this prompt must report, when everything so far has been saved."""
        most = (len(prompt) - 1) // self.block_size
        shared = [_common(prompt, sequence) // self.block_size for sequence in self._devices.get(replica, [])]
        contained = [
            len(sequence) // self.block_size for sequence in self._saved if _common(prompt, sequence) == len(sequence)
        ]
        device = min(max(shared, default=0), most)
        reused = max(device, min(max(contained, default=0), most))
        return TokensBySource(
            device=device * self.block_size,
            cpu=(reused - device) * self.block_size,
            recomputed=len(prompt) - reused * self.block_size,
        )

    def _whole_blocks(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens[: len(tokens) // self.block_size * self.block_size])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
