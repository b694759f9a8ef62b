"""What the KV of a model weighs, by the numbers of its published configuration: a token's, and a landing's.

A landing is a boundary of blocks at which a computation may begin: layers with a window need its last tokens there,
layers with a state need the state. `docs/concepts/models.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ELEMENT_BYTES = 2
"""Of bfloat16, in which these models keep their KV."""


@dataclass(frozen=True, slots=True)
class States:
    """Layers with a recurrent state: Mamba 2, or a gated delta net."""

    layers: int
    state_elements: int
    """Of a layer: heads times head size times state size."""
    convolution_elements: int
    """Of a layer: channels times one less than the kernel."""

    def landing_bytes(self, state_element_bytes: int) -> int:
        """Bytes of one state of all layers. The convolution's part is always kept in bfloat16."""
        elements = self.state_elements * state_element_bytes + self.convolution_elements * ELEMENT_BYTES
        return self.layers * elements


@dataclass(frozen=True, slots=True)
class KVWeight:
    """The layers of one model that keep something of a sequence."""

    dense_layers: int
    kv_heads: int
    head_size: int
    window_layers: int = 0
    window_tokens: int = 0
    states: States | None = None

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.kv_heads * self.head_size * ELEMENT_BYTES

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token in layers that attend to everything."""
        return self.dense_layers * self.layer_token_bytes

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of one token in a tier, where KV is shared: of all layers but those with states."""
        return (self.dense_layers + self.window_layers) * self.layer_token_bytes

    def landing_bytes(self, state_element_bytes: int = ELEMENT_BYTES) -> int:
        """Bytes that one landing needs in addition to dense KV: a window of all its layers, and a state."""
        window = self.window_layers * self.window_tokens * self.layer_token_bytes
        return window + (self.states.landing_bytes(state_element_bytes) if self.states else 0)


WEIGHTS: Mapping[str, KVWeight] = {
    "gpt-oss-20b": KVWeight(12, 8, 64, window_layers=12, window_tokens=128),
    "gemma-3-4b-it": KVWeight(5, 4, 256, window_layers=29, window_tokens=1024),
    "gemma-3-27b-it": KVWeight(10, 16, 128, window_layers=52, window_tokens=1024),
    "qwen3-next-80b-a3b-instruct": KVWeight(
        12, 2, 256, states=States(36, 32 * 128 * 128, (2 * 16 * 128 + 32 * 128) * 3)
    ),
    "nemotron-h-8b-base-8k": KVWeight(4, 8, 128, states=States(24, 128 * 64 * 128, (128 * 64 + 2 * 8 * 128) * 3)),
    "granite-4.0-h-small": KVWeight(4, 8, 128, states=States(36, 128 * 64 * 128, (128 * 64 + 2 * 128) * 3)),
}
"""By the name of a preset in `configs/models`: models whose layers do not all attend to everything."""


def weight_row(name: str) -> str:
    """Return a model's row in the table of `docs/concepts/models.md`."""
    weight = WEIGHTS[name]
    stored = f"{weight.stored_token_bytes // 1024} KiB"
    landing = f"{weight.landing_bytes() / 2**20:.0f}"
    if weight.states is not None:
        landing += f" or {weight.landing_bytes(4) / 2**20:.0f}"
    tokens = f"{weight.landing_bytes() / weight.dense_token_bytes:,.0f}"
    return f"| `{name}` | {weight.dense_token_bytes // 1024} KiB | {stored} | {landing} MiB | {tokens} |"
