"""What is compared: ways to have the KV of a prompt's documents without recomputing all of it.

A method makes KV of the first tokens of a case; what follows is read after it. To add one (a codec, a combination),
write a class with `name`, `bytes_ratio`, `computed` and `kv`, and put it into `methods`. Sparse levels are in `sparse`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from kernels.codecs import LEVELS, CodecProfile, make_codec
from load_tests.blending.forward import Prefill, blend, stored_chunks
from load_tests.codec.arms import Arm
from load_tests.codec.model import KV_DTYPE
from load_tests.quality.cases import Case
from load_tests.quality.sparse import MaskedKV

BLOCK_TOKENS = 32


class Method(Protocol):
    """One row of the table."""

    name: str

    def kv(self, model: Any, case: Case, full: Prefill) -> torch.Tensor | MaskedKV | None:
        """(layers, 2, tokens, kv_heads, head_dim) of the case's first tokens; None where there is nothing to reuse."""

    @property
    def bytes_ratio(self) -> float:
        """Times smaller than bfloat16, of all that was stored so far."""

    @property
    def computed(self) -> float:
        """Share of the reused part's prefill, in layers times tokens, that was computed all the same."""


class Stored:
    """The prefix's whole blocks, through a codec."""

    computed = 0.0

    def __init__(self, arm: Arm, name: str) -> None:
        self.arm, self.name = arm, name

    def kv(self, model: Any, case: Case, full: Prefill) -> torch.Tensor | None:
        """See `Method`."""
        stop = case.prefix // BLOCK_TOKENS * BLOCK_TOKENS
        return self.arm.through(full.kv[:, :, :stop].to(KV_DTYPE).contiguous()) if stop else None

    @property
    def bytes_ratio(self) -> float:
        """See `Method`."""
        return self.arm.ratio if self.arm.raw_bytes else 1.0


class FourBits:
    """The prefix's whole blocks in 4 bits a value, with a float16 scale and zero per token and head.

    No codec of the server: it stands for what is published of quantized KV.
    """

    name = "int4, no codec of the server"
    computed = 0.0

    def __init__(self) -> None:
        self._head_dim = 0

    def kv(self, model: Any, case: Case, full: Prefill) -> torch.Tensor | None:
        """See `Method`."""
        stop = case.prefix // BLOCK_TOKENS * BLOCK_TOKENS
        if not stop:
            return None
        values = full.kv[:, :, :stop].float()
        self._head_dim = values.shape[-1]
        zero = values.amin(-1, keepdim=True).half().float()
        scale = ((values.amax(-1, keepdim=True) - zero) / 15).half().float().clamp(min=torch.finfo(torch.half).tiny)
        return (((values - zero) / scale).round().clamp(0, 15) * scale + zero).to(KV_DTYPE)

    @property
    def bytes_ratio(self) -> float:
        """See `Method`."""
        return 16 / (4 + 32 / self._head_dim) if self._head_dim else 1.0


class Blended:
    """The documents, each computed alone, joined at a check layer and a ratio.

    Chunks are exact prompts, so they are stored without loss: there is no row that combines this with a lossy codec.
    """

    def __init__(self, arm: Arm, name: str, check_layer: int, ratio: float, choice: Any = "deviation") -> None:
        self.arm, self.name = arm, name
        self.check_layer, self.ratio, self.choice = check_layer, ratio, choice
        self._computed = self._whole = 0.0
        self._asked = 0

    def kv(self, model: Any, case: Case, full: Prefill) -> torch.Tensor | None:
        """See `Method`."""
        chunks = stored_chunks(model, case.ids, case.chunks, BLOCK_TOKENS)
        if not chunks:
            return None
        chunks = [replace(chunk, kv=self.arm.through(chunk.kv)) for chunk in chunks]
        layers, tokens = len(full.kv), chunks[-1].stop
        reused = sum(chunk.stop - chunk.start for chunk in chunks)
        kept = tokens - reused + round(self.ratio * reused)
        self._computed += self.check_layer * tokens + (layers - self.check_layer) * kept
        self._whole += layers * tokens
        self._asked += 1
        return blend(model, full, chunks, self.check_layer, self.ratio, self.choice, seed=self._asked)

    @property
    def bytes_ratio(self) -> float:
        """See `Method`."""
        return self.arm.ratio if self.arm.raw_bytes else 1.0

    @property
    def computed(self) -> float:
        """See `Method`."""
        return self._computed / self._whole if self._whole else 1.0


def methods(profile: CodecProfile, check_layer: int, ratio: float) -> list[Method]:
    """Every row, least loss first; `check_layer` and `ratio` of the blended ones."""

    def arm(codec: str, level: int = 0) -> Arm:
        return Arm(make_codec(codec, level, profile) if level else make_codec(codec))

    stored: list[Method] = [Stored(arm("lossless"), "exact, lossless"), FourBits()]
    stored += [Stored(arm("cachegen", level), f"cachegen {level}") for level in LEVELS]
    said = f"check layer {check_layer}, ratio {ratio:g}"
    blended: list[Method] = [
        Blended(arm("lossless"), f"blended, {said}", check_layer, ratio),
        Blended(arm("lossless"), "blended, as many random tokens", check_layer, ratio, "random"),
        Blended(arm("lossless"), "naive reuse of documents", 0, 0.0),
    ]
    return stored + blended
