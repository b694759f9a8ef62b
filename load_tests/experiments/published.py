"""KV-relevant shapes of published models, from the config.json of each on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedShape:
    """Full attention in every layer; `parameters` in billions."""

    name: str
    parameters: float
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """2 (K and V) · layers · KV heads · head dimension · bytes of a value."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype_bytes


PUBLISHED = (
    PublishedShape("Llama-2-7B", 6.7, 32, 32, 128),
    PublishedShape("Llama-2-13B", 13.0, 40, 40, 128),
    PublishedShape("Llama-2-70B", 69.0, 80, 8, 128),
    PublishedShape("Llama-3.1-8B", 8.0, 32, 8, 128),
    PublishedShape("Llama-3.1-70B", 70.6, 80, 8, 128),
    PublishedShape("Qwen2.5-7B", 7.6, 28, 4, 128),
    PublishedShape("Qwen2.5-14B", 14.8, 48, 8, 128),
    PublishedShape("Qwen2.5-32B", 32.8, 64, 8, 128),
    PublishedShape("Qwen3-8B", 8.2, 36, 8, 128),
)
