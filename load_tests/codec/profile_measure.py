"""What a codec profile is made of, measured: moments, distributions, whether anchors pay, which layers are sensitive.

A sample is a prefix, whose KV would be stored, and what is read after it. Sensitivity is the KL divergence of the next
token's distribution over that rest, in nats, when one (group of layers, K|V) is quantized and all others are not, per
mean squared error of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.codecs.profile import ANCHOR_FACTOR, GROUP_TOKENS, LEVELS, CodecProfile, HalfProfile
from kernels.codecs.step_plan import FACTOR_UNIT, entropy_and_error, histogram, plan_for
from load_tests.codec.model import continued, divergence, prefix_kv, segments

BITS = {1: 3.9, 2: 2.5, 3: 1.7}
"""Per element, what each level may take: 4.1, 6.4 and 9.4 times less than bfloat16. A size and not a KL: the size is
nearly the same for other text, and the KL hangs on the few tokens that a model can hardly decide."""
PROBES = (0.5, 1.5)
"""Step factors at which sensitivity is measured; the larger of the two estimates counts."""
FACTORS = FACTOR_UNIT * np.arange(1, 65)
"""Steps to choose from: up to four deviations, which leaves hardly more than the mean."""
MOST_GROUPS = 12
_LEAST_DEVIATION_SHARE = 1e-3
"""A channel that hardly varies gets this share of its tensor's deviation: no step may be as small as noise."""
_LEAST_SENSITIVITY = 1e-7
_PRICES = np.logspace(-12, 6, 2000)
"""Of a bit per element, in KL: from one that buys every bit to one that buys none."""

Tick = Callable[[], None]
Factors = np.ndarray[Any, np.dtype[np.float64]]
"""(layers, 2) step factors; 0: unchanged."""


@dataclass(frozen=True)
class Sample:
    """Token ids. ``judged`` are the positions in ``rest`` whose next token counts; None: all."""

    prefix: list[int]
    rest: list[int]
    judged: list[int] | None = None


@dataclass(frozen=True)
class Distributions:
    """Of a model's KV: float32 ``(layers, 2, channels)`` moments; histograms by [layer][half]."""

    mean: torch.Tensor
    deviation: torch.Tensor
    plain: list[list[np.ndarray]]
    anchors: list[list[np.ndarray]]
    deltas: list[list[np.ndarray]]


def distributions(model: Any, samples: Sequence[Sample], tick: Tick) -> Distributions:
    """Two passes over all tokens of the samples: moments first, then histograms in units of them."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for kv in _all_kv(model, samples, tick):
        count += kv.shape[2]
        total = total + kv.double().sum(2)
        squares = squares + kv.double().square().sum(2)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    floor = _LEAST_DEVIATION_SHARE * deviation.mean(-1, keepdim=True)
    mean, deviation = (x.half().float() for x in (mean, torch.maximum(deviation, floor).clamp(min=2.0**-14)))
    layers = len(mean)
    plain, anchors, deltas = ([[np.zeros(1)] * 2 for _ in range(layers)] for _ in range(3))
    for kv in _all_kv(model, samples, tick):
        z = (kv - mean[:, :, None]) / deviation[:, :, None]
        for part in segments(z):
            first = z[:, :, part][:, :, ::GROUP_TOKENS]
            base = (first / ANCHOR_FACTOR).round() * ANCHOR_FACTOR
            near = z[:, :, part] - base.repeat_interleave(GROUP_TOKENS, 2)[:, :, : part.stop - part.start]
            others = torch.arange(near.shape[2]) % GROUP_TOKENS != 0
            for layer in range(layers):
                for half in range(2):
                    plain[layer][half] = plain[layer][half] + histogram(z[layer, half, part].numpy())
                    anchors[layer][half] = anchors[layer][half] + histogram(first[layer, half].numpy())
                    deltas[layer][half] = deltas[layer][half] + histogram(near[layer, half][others].numpy())
    return Distributions(mean, deviation, plain, anchors, deltas)


def _all_kv(model: Any, samples: Sequence[Sample], tick: Tick) -> Iterator[torch.Tensor]:
    """float32 (layers, 2, tokens, channels)."""
    for sample in samples:
        yield prefix_kv(model, sample.prefix + sample.rest).float().flatten(3)
        tick()


class Probe:
    """Measures what quantization does to the next token, on a few samples whose KV and logits it holds."""

    def __init__(self, model: Any, samples: Sequence[Sample], found: Distributions) -> None:
        self._model = model
        self._found = found
        self._held = []
        for sample in samples:
            kv = prefix_kv(model, sample.prefix)
            judged = torch.arange(len(sample.rest)) if sample.judged is None else torch.tensor(sample.judged)
            self._held.append((sample, kv, judged, continued(model, kv, sample.rest)[judged]))

    def divergence(self, factors: Factors) -> float:
        """Mean KL in nats with these step factors."""
        parts = []
        for sample, kv, judged, exact in self._held:
            logits = continued(self._model, self._quantized(kv, factors), sample.rest)
            parts.append(divergence(exact, logits[judged]))
        return float(torch.cat(parts).mean())

    def _quantized(self, kv: torch.Tensor, factors: Factors) -> torch.Tensor:
        changed = kv.clone()
        for layer, half in np.argwhere(factors > 0).tolist():
            mean, step = self._found.mean[layer, half], self._found.deviation[layer, half] * factors[layer, half]
            x = kv[layer, half].float().flatten(1)
            changed[layer, half] = (((x - mean) / step).round() * step + mean).to(kv.dtype).view_as(kv[layer, half])
        return changed


def layer_groups(layers: int) -> list[list[int]]:
    """Neighbouring layers that are measured together."""
    return [part.tolist() for part in np.array_split(np.arange(layers), min(layers, MOST_GROUPS))]


def sensitivities(probe: Probe, found: Distributions, tick: Tick) -> np.ndarray:
    """float64 (layers, 2): KL per mean squared error, which is in squares of a channel's deviation."""
    layers = len(found.plain)
    sensitivity = np.zeros((layers, 2))
    for group in layer_groups(layers):
        for half in range(2):
            estimates = []
            for factor in PROBES:
                factors = np.zeros((layers, 2))
                factors[group, half] = factor
                error = sum(entropy_and_error(found.plain[layer][half], factor)[1] for layer in group)
                estimates.append(probe.divergence(factors) / error)
                tick()
            sensitivity[group, half] = max(*estimates, _LEAST_SENSITIVITY)
    return sensitivity


def halves_apart(probe: Probe, layers: int) -> dict[str, float]:
    """The paper's insight 3: KL with only the shallow half of the layers in steps of 1, and only the deep half."""
    middle = layers // 2
    shallow, deep = np.zeros((layers, 2)), np.zeros((layers, 2))
    shallow[:middle], deep[middle:] = 1.0, 1.0
    return {"shallow": probe.divergence(shallow), "deep": probe.divergence(deep)}


def level_factors(
    found: Distributions, sensitivity: np.ndarray, bits: float, kept: Sequence[float] | None = None
) -> Factors:
    """The step factors of least expected KL, sensitivity times error, whose symbols take at most ``bits`` per element.

    ``kept``: the part of each layer's tokens that is stored at all; None: all. Bits are per element that is stored.

    At the best choice one more bit saves as much KL whichever K or V it is given to (Y. Shoham and A. Gersho, 1988): so
    each takes what is best for it at one price of a bit, and the price is the least at which all together fit.
    """
    curves = [[[entropy_and_error(counts, factor) for factor in FACTORS] for counts in pair] for pair in found.plain]
    entropy, error = np.moveaxis(np.array(curves), -1, 0)  # (layers, 2, factors) each
    chosen = np.full(sensitivity.shape, len(FACTORS) - 1)
    weight = np.ones(len(sensitivity)) if kept is None else np.asarray(kept) / np.mean(kept)
    entropy = weight[:, None, None] * entropy
    for price in _PRICES:
        chosen = np.argmin(sensitivity[..., None] * error + price * entropy, axis=-1)
        if np.take_along_axis(entropy, chosen[..., None], -1).mean() <= bits:
            break
    factors: Factors = FACTORS[chosen]
    return factors


def assemble(found: Distributions, by_level: dict[int, Factors], model: bytes, heads: tuple[int, int]) -> CodecProfile:
    """The profile, anchors included where they save bits at the middle level."""
    layers = len(found.mean)

    def half_profile(layer: int, half: int) -> HalfProfile:
        plain, deltas = found.plain[layer][half], found.deltas[layer][half]
        anchors, anchor_bits = plan_for(found.anchors[layer][half], ANCHOR_FACTOR)
        factor = float(by_level[2][layer, half])
        grouped = (anchor_bits + (GROUP_TOKENS - 1) * plan_for(deltas, factor)[1]) / GROUP_TOKENS
        pays = grouped < plan_for(plain, factor)[1]
        counts = deltas if pays else plain
        return HalfProfile(
            tuple(plan_for(counts, float(by_level[level][layer, half]))[0] for level in LEVELS),
            anchors if pays else None,
            found.mean[layer, half].numpy(),
            found.deviation[layer, half].numpy(),
        )

    halves = tuple((half_profile(layer, 0), half_profile(layer, 1)) for layer in range(layers))
    return CodecProfile((layers, *heads), model, halves)
