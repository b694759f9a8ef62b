"""Blended KV of a transformers model, layer by layer in float32: CacheBlend (arXiv 2405.16444, section 4.3).

The same algorithm as the engine's, in a few lines that calibrate and check it. The differences: everything is computed
in float32 on the CPU, by the model's own decoder layers in transformers; only the stored KV is rounded to bfloat16.

Layers before the check layer are computed whole, so the prefill's own hidden states there are the blend's. In the check
layer keys and values of all rows are the new ones. After it only the kept rows are computed: those that no chunk
covers, and of the others the share whose values the check layer found furthest from the stored ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.rope.shift import shift_keys
from load_tests.codec.model import kv_shape, prefix_kv

MOST_MOVING_ERROR = 0.02
"""Relative. Rounding to bfloat16 is .003; keys turned the wrong way are of the order of 1."""
Choice = Literal["deviation", "random"]
_ROPE_OF_ANY_LENGTH = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class StoredChunk:
    """KV of tokens that were computed as a prompt of their own, and where they stand in another prompt."""

    start: int
    kv: torch.Tensor
    """(layers, 2, tokens, kv_heads, head_dim), keys rotated for positions from 0 on."""

    @property
    def stop(self) -> int:
        """One past its last token in the prompt."""
        return self.start + self.kv.shape[2]


@dataclass(frozen=True)
class Prefill:
    """What a whole prefill computes of a prompt."""

    hidden: Sequence[torch.Tensor]
    """(tokens, hidden): the input of each layer."""
    kv: torch.Tensor
    """(layers, 2, tokens, kv_heads, head_dim), float32."""
    logits: torch.Tensor
    """(tokens, vocabulary)."""


def why_not(model: Any) -> str | None:
    """A sentence that says why this model cannot be blended here; None: it can."""
    config = model.config.get_text_config()
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "layers") or not hasattr(inner, "rotary_emb"):
        return f"{type(model).__name__} has no decoder layers with one rotary embedding, so its KV cannot be moved"
    if any("sliding" in kind for kind in getattr(config, "layer_types", None) or ()):
        return "layers with a sliding window are not blended"
    kind = inner.rotary_emb.rope_type
    return None if kind in _ROPE_OF_ANY_LENGTH else f"keys under rope of type {kind!r} cannot be moved"


@torch.inference_mode()
def prefill(model: Any, ids: Sequence[int]) -> Prefill:
    """Read `ids` whole."""
    out = model(torch.tensor([list(ids)]), use_cache=True, output_hidden_states=True)
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in out.past_key_values.layers]
    kv = torch.stack(layers).transpose(2, 3).float().contiguous()
    return Prefill([one[0] for one in out.hidden_states[:-1]], kv, out.logits[0].float())


def stored_chunks(
    model: Any, ids: Sequence[int], spans: Sequence[tuple[int, int]], block_tokens: int = 32
) -> list[StoredChunk]:
    """The chunks [start, stop) of `ids`, each computed alone. Only whole blocks are stored; a shorter chunk is none."""
    whole = [(start, start + (stop - start) // block_tokens * block_tokens) for start, stop in spans]
    return [StoredChunk(start, prefix_kv(model, ids[start:stop])) for start, stop in whole if stop > start]


def moved(model: Any, chunk: StoredChunk) -> torch.Tensor:
    """The chunk's KV with its keys turned to where it stands, in float32."""
    kv = chunk.kv.float()
    frequencies = model.model.rotary_emb.inv_freq.float()
    for keys in kv[:, 0]:
        shift_keys(keys, chunk.start, frequencies, "neox")
    return kv


def moves_truly(model: Any, full: Prefill, chunk: StoredChunk) -> bool:
    """Whether the moved keys of layer 0, which know nothing of other tokens, are those of a whole prefill."""
    computed = full.kv[0, 0, chunk.start : chunk.stop]
    error = (moved(model, chunk)[0, 0] - computed).norm() / computed.norm()
    return bool(error <= MOST_MOVING_ERROR)


class _Rows:
    """Stands in for transformers' cache: rows are written at their places, and all places are seen."""

    def __init__(self, kv: torch.Tensor, rows: torch.Tensor) -> None:
        self.kv, self.rows = kv, rows

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, heads, rows, dim) in, (1, heads, tokens, dim) out."""
        self.kv[layer, 0, self.rows] = keys[0].transpose(0, 1)
        self.kv[layer, 1, self.rows] = values[0].transpose(0, 1)
        whole = self.kv[layer].transpose(1, 2)
        return whole[0][None], whole[1][None]


@torch.inference_mode()
def blend(
    model: Any,
    full: Prefill,
    chunks: Sequence[StoredChunk],
    check_layer: int,
    ratio: float,
    choice: Choice = "deviation",
    seed: int = 0,
) -> torch.Tensor:
    """Blended KV (layers, 2, tokens, kv_heads, head_dim) up to the last chunk's end, float32.

    `check_layer` 0 with `ratio` 0 is naive reuse. `choice` "random" keeps as many rows, drawn by `seed`.
    """
    stop = max(chunk.stop for chunk in chunks)
    layers, *_ = kv_shape(model)
    kv = full.kv[:, :, :stop].clone()
    kv[check_layer + 1 :] = 0  # so that what is neither stored nor computed is not there
    reused = torch.zeros(stop, dtype=torch.bool)
    score = torch.full((stop,), torch.inf)
    for chunk in chunks:
        place = slice(chunk.start, chunk.stop)
        stored = moved(model, chunk)
        reused[place] = True
        score[place] = (kv[check_layer, 1, place] - stored[check_layer, 1]).square().sum((1, 2))
        kv[check_layer + 1 :, :, place] = stored[check_layer + 1 :]
    if choice == "random":
        drawn = torch.rand(stop, generator=torch.Generator().manual_seed(seed))
        score = torch.where(reused, drawn, score)
    keep = int((~reused).sum()) + round(ratio * int(reused.sum()))
    rows = score.topk(keep).indices.sort().values
    hidden = full.hidden[check_layer][rows][None]
    angles = model.model.rotary_emb(hidden, position_ids=rows[None])
    seen = torch.arange(stop)[None] <= rows[:, None]
    mask = torch.zeros(len(rows), stop).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    cache = _Rows(kv, rows)
    for layer in model.model.layers[check_layer:layers]:
        hidden = layer(
            hidden, attention_mask=mask, position_ids=rows[None], past_key_values=cache, use_cache=True,
            position_embeddings=angles,
        )  # fmt: skip
    return kv
