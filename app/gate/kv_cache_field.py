"""A body's field `kv_cache`: what a request says about the KV of its prompt.

`{"kv_cache": {"fidelity": "exact" | "tolerant" | "blended", "recompute_ratio": 0.15, "chunks": ["a text", …]}}` (the
official client's `extra_body`), which OpenAI's protocol lets pass and vLLM ignores: nothing of it reaches an engine.
The last two concern blended prompts only; what they mean says docs/concepts/blending.md, and what follows from a
fidelity docs/concepts/compression.md. How much the texts may hold: `app.gate.request_bounds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from vllm.exceptions import VLLMValidationError

from kvmanager.segments.keys import BLENDED, Fidelity

FIELD = "kv_cache"
RATIO, CHUNKS = f"{FIELD}.recompute_ratio", f"{FIELD}.chunks"
MOST_CHUNKS = 256
"""Texts that one request may name, and chunks that are looked for in one prompt."""
_FIDELITIES: tuple[str, ...] = get_args(Fidelity)
_KNOWN = ("fidelity", "recompute_ratio", "chunks")


@dataclass(frozen=True, slots=True)
class KVCacheField:
    """What the field says; None where it says nothing."""

    fidelity: Fidelity | None = None
    recompute_ratio: float | None = None
    """Share of the reused chunks' tokens that is recomputed."""
    chunks: tuple[str, ...] | None = None
    """Texts in the prompt that are its chunks, in place of those that separators begin."""

    def of_one_fidelity(self) -> tuple[str, Fidelity | None]:
        """What it says that only prompts of one fidelity can have, as a parameter's name, and that fidelity."""
        if self.recompute_ratio is not None:
            return RATIO, BLENDED
        return ("", None) if self.chunks is None else (CHUNKS, BLENDED)


SAYS_NOTHING = KVCacheField()


def read_field(value: object) -> KVCacheField:
    """The field's value as JSON had it. Raises VLLMValidationError (400), naming the part, for what cannot be meant."""
    if value is None:
        return SAYS_NOTHING
    if not isinstance(value, dict):
        raise VLLMValidationError(f'`{FIELD}` must be an object, such as {{"fidelity": "tolerant"}}.', parameter=FIELD)
    unknown = next((name for name in value if name not in _KNOWN), None)
    if unknown is not None:
        param, known = f"{FIELD}.{str(unknown)[:64]}", " and ".join(f"`{name}`" for name in _KNOWN)
        raise VLLMValidationError(f"`{param}` is not known; `{FIELD}` takes {known}.", parameter=param)
    return KVCacheField(
        read_fidelity(value.get("fidelity")), _ratio(value.get("recompute_ratio")), _chunks(value.get("chunks"))
    )


def read_fidelity(value: object, param: str = f"{FIELD}.fidelity") -> Fidelity | None:
    """What a client gave as `param`; None when it gave nothing. Raises VLLMValidationError (400) for what is none."""
    if value is not None and value not in _FIDELITIES:
        shown = " or ".join(f"`{name}`" for name in _FIDELITIES)
        raise VLLMValidationError(f"`{param}` must be {shown}.", parameter=param)
    return cast("Fidelity | None", value)


def chunk_texts(body: Mapping[str, object]) -> list[str]:
    """The texts that a body's field names as chunks, whatever else is wrong with it; for `RequestBounds`."""
    value = body.get(FIELD)
    texts = value.get("chunks") if isinstance(value, dict) else None
    return [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []


def _ratio(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN is not, either
        raise VLLMValidationError(f"`{RATIO}` must be a number from 0 to 1.", parameter=RATIO)
    return float(value)


def _chunks(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise VLLMValidationError(f"`{CHUNKS}` must be a list of texts that occur in the prompt.", parameter=CHUNKS)
    if len(value) > MOST_CHUNKS:
        raise VLLMValidationError(f"`{CHUNKS}` holds more than {MOST_CHUNKS} texts.", parameter=CHUNKS)
    return tuple(value)
