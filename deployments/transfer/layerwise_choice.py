"""Whether a request's prefix is loaded layerwise: `kvmanager.loading.overlap` with what this replica has measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from configs.kv_section import LayerwiseSettings
from deployments.protocol.kv_port import KVPort
from deployments.transfer.jobs import LoadPart
from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import LoadRates, Sample
from kvmanager.loading.overlap import LoadWay, choose_way

LATE = 4.0
"""A layerwise load is given up after this many times its expected time: the engine's step waits for it."""
LEAST_TIMEOUT_S = 0.2
"""A tier that does not answer three times in so short a time would not be asked for a while by any load."""


class MeasuredRates:
    """Rates at which this replica loads and computes. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates = LoadRates(dict.fromkeys(Tier, 0.0))

    def add(self, sample: Sample) -> None:
        """Take in a load or a prefill."""
        with self._lock:
            if sample[0] == "prefill":
                self._rates.prefilled(*sample[1:], now=time.monotonic())
            elif sample[0] == "load":
                self._rates.loaded(Tier(sample[1]), *sample[2:], now=time.monotonic())

    def given_up(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note a load that was waited for in vain for `seconds`."""
        with self._lock:
            self._rates.given_up(Tier(tier), nbytes, seconds, now=time.monotonic())

    def compute_s(self, tokens: int, context: int) -> float | None:
        """Expected seconds of the engine for `tokens` that follow `context` others; None: not known yet."""
        with self._lock:
            prefill = self._rates.prefill()
        return prefill.seconds(tokens, context) if prefill else None

    def load_s(self, nbytes_by_tier: dict[str, int]) -> tuple[float, float] | None:
        """Expected seconds until the first byte, and until the last, of a load; None: not known yet."""
        latency_s = moving_s = 0.0
        with self._lock:
            for tier, nbytes in nbytes_by_tier.items():
                tier_time = self._rates.tier_time(Tier(tier))
                if tier_time is None:
                    return None
                latency_s = max(latency_s, tier_time.latency_s)
                moving_s += nbytes / tier_time.per_s
        return latency_s, latency_s + moving_s


class LayerwiseChoice:
    """Decides for each load. On the engine thread."""

    def __init__(
        self,
        settings: LayerwiseSettings,
        port: KVPort,
        rates: MeasuredRates,
        block_bytes: int,
        group_ends: Sequence[int],
    ) -> None:
        """`block_bytes`: KV of one block in all layers."""
        self.mode = settings.enabled
        self._port = port
        self._rates = rates
        self._block_bytes = block_bytes
        self._group_ends = group_ends

    def timeout_s(
        self,
        parts: Sequence[LoadPart],
        context_tokens: int,
        step_tokens: int,
        others: int,
        buffer_bytes: int,
        within_s: float,
    ) -> float | None:
        """Return how long a layerwise load of `parts` may take; None: load the whole prefix outside the step.

        `step_tokens` are what the step computes of the prompt's rest, after `context_tokens`; `others` requests would
        stand still with it; `buffer_bytes` are left for its groups of layers; a load may take `within_s`.
        """
        if step_tokens < 2:  # nothing to hide behind; and on CUDA a step of single tokens is one graph, without hooks
            return None
        tiers = {part.load.tier for part in parts}
        if self.mode == "off" or not all(map(self._port.brings_layers, tiers)):
            return None
        group_bytes = self.group_bytes(sum(part.blocks for part in parts))
        if self.mode == "on":
            return within_s if group_bytes <= buffer_bytes else None
        nbytes: dict[str, int] = dict.fromkeys(tiers, 0)
        for part in parts:
            nbytes[part.load.tier] += self._block_bytes * part.blocks
        compute_s = self._rates.compute_s(step_tokens, context_tokens)
        expected = self._rates.load_s(nbytes)
        if compute_s is None or expected is None:
            return None
        first_byte_s, load_s = expected
        groups = len(self._group_ends)
        overlap = choose_way(
            first_group_s=first_byte_s + (load_s - first_byte_s) / groups,
            load_s=load_s,
            compute_s=compute_s,
            groups=groups,
            others=others,
            group_bytes=group_bytes,
            buffer_bytes=buffer_bytes,
        )
        if overlap.way is LoadWay.WHOLE:
            return None
        return min(within_s, max(LEAST_TIMEOUT_S, LATE * load_s))

    def group_bytes(self, blocks: int) -> int:
        """Return the bytes of the largest group of layers of `blocks` blocks."""
        return group_bytes(self._block_bytes, self._group_ends, blocks)


def group_ends(layers: int, per_group: int) -> list[int]:
    """The ends of groups of `per_group` layers, the last of which may be smaller."""
    return [*range(per_group, layers, per_group), layers]


def group_bytes(block_bytes: int, group_ends: Sequence[int], blocks: int) -> int:
    """Bytes of the largest group of layers of `blocks` blocks of `block_bytes` in all layers."""
    largest = max(end - start for start, end in zip((0, *group_ends), group_ends, strict=False))
    return blocks * block_bytes // group_ends[-1] * largest
