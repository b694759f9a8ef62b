"""The settings of crosskv: one tree, validated before anything starts. `args:` in serve_config.yaml is this tree.

The sections lie in `configs.sections`; this file holds what concerns the whole server and the checks across sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from configs import machine
from configs.errors import SettingsError, one_sentence
from configs.model_folder import DEMO_MODEL, PROJECT_ROOT, find_model, own_max_tokens
from configs.sections import (
    CPU_BLOCK_MULTIPLE_TOKENS,
    EngineSettings,
    HTTPSettings,
    KVSettings,
    RoutingSettings,
    Section,
)

__all__ = ["PROJECT_ROOT", "Settings", "SettingsError", "load_settings"]

_LARGEST_TIER_SHARE = 0.5  # of the machine's memory: the replicas and the page cache need the rest
_DEFAULT_BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
_DEFAULT_DEVICE_BLOCKS = {
    "cpu": 256,
    "cuda": None,
}  # CPU memory is shared by all replicas, so the pool has a fixed size


class Settings(Section):
    """Everything that can be set, below `args:` in serve_config.yaml."""

    model: str = Field(
        DEMO_MODEL,
        min_length=1,
        description="A folder in Hugging Face's format (relative to the project), or a Hugging Face id.",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The name that clients ask for. Empty: the model's own."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and KV. `auto`: what the model was saved in."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest prompt and answer together. Empty: the model's own limit, or what `device_blocks` hold.",
    )
    seed: int = Field(0, ge=0, description="Seed for sampling where a request gives none.")
    chat_template: str | None = Field(
        None, description="A file with a Jinja chat template. Empty: the tokenizer's own."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    replicas: int = Field(2, ge=1, description="Engines that serve the model side by side.")
    engine: EngineSettings = Field(default_factory=EngineSettings, description="The vLLM engine inside each replica.")
    kv: KVSettings = Field(default_factory=KVSettings, description="The shared KV cache.")
    http: HTTPSettings = Field(default_factory=HTTPSettings, description="The HTTP surface.")
    routing: RoutingSettings = Field(default_factory=RoutingSettings, description="How a replica is chosen.")

    @cached_property
    def model_source(self) -> str:
        """What vLLM loads: the model folder's absolute path, or the hub id."""
        return str(find_model(self.model))

    @property
    def model_name(self) -> str:
        """The name that clients ask for: `served_model_name`, a folder's last part, or the hub id."""
        return self.served_model_name or (Path(self.model_source).name if self.model_source[0] == "/" else self.model)

    @property
    def block_size_tokens(self) -> int:
        """Tokens per KV block, with this machine's default filled in."""
        return self.engine.block_size_tokens or _DEFAULT_BLOCK_TOKENS[machine.accelerator()]

    @property
    def device_blocks(self) -> int | None:
        """KV blocks per replica, with this machine's default filled in; None: vLLM takes what it finds room for."""
        return self.engine.device_blocks or _DEFAULT_DEVICE_BLOCKS[machine.accelerator()]

    @property
    def device_pool_tokens(self) -> int | None:
        """Tokens of the longest request that the device pool holds; vLLM keeps one block for itself, the null block."""
        return None if self.device_blocks is None else (self.device_blocks - 1) * self.block_size_tokens

    def longest_request_tokens(self, models_own_limit: int) -> int:
        """`max_model_len` for vLLM: the setting, else the model's own limit shortened to what the device pool holds."""
        return self.max_model_len or min(models_own_limit, self.device_pool_tokens or models_own_limit)

    @property
    def blocks_per_segment(self) -> int:
        """KV blocks in a full segment."""
        return self.kv.segment_tokens // self.block_size_tokens

    @field_validator("model")
    @classmethod
    def _model_can_be_found(cls, value: str) -> str:
        find_model(value)
        return value

    @field_validator("chat_template")
    @classmethod
    def _chat_template_is_a_file(cls, value: str | None) -> str | None:
        if value is not None and not (PROJECT_ROOT / Path(value).expanduser()).is_file():
            raise ValueError(f"there is no file {value!r}; give the path of a Jinja template, or leave it empty")
        return value

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Settings:
        self._check_block_size()
        self._check_lengths()
        self._check_tier()
        return self

    def _check_block_size(self) -> None:
        block = self.block_size_tokens
        if machine.accelerator() == "cpu" and block % CPU_BLOCK_MULTIPLE_TOKENS:
            raise ValueError(
                f"engine.block_size_tokens: vLLM's CPU backend needs a multiple of {CPU_BLOCK_MULTIPLE_TOKENS}, "
                f"not {block}; use {_next_multiple(block, CPU_BLOCK_MULTIPLE_TOKENS)}"
            )
        if self.kv.segment_tokens % block:
            raise ValueError(
                f"kv.segment_tokens: {self.kv.segment_tokens} is not a multiple of the block size, {block} tokens; "
                f"use {_next_multiple(self.kv.segment_tokens, block)}"
            )

    def _check_lengths(self) -> None:
        own = own_max_tokens(find_model(self.model))
        if self.max_model_len and own and self.max_model_len > own:
            raise ValueError(f"max_model_len: the model was made for at most {own} tokens, not {self.max_model_len}")
        pool = self.device_pool_tokens
        if self.max_model_len and pool is not None and self.max_model_len > pool:
            least = -(-self.max_model_len // self.block_size_tokens) + 1
            raise ValueError(
                f"engine.device_blocks: {self.device_blocks} blocks of {self.block_size_tokens} tokens do not hold one "
                f"request of max_model_len {self.max_model_len} tokens; use at least {least}, or lower max_model_len "
                f"to {pool}"
            )

    def _check_tier(self) -> None:
        limit = int(machine.memory_bytes() * _LARGEST_TIER_SHARE)
        if self.kv.enabled and self.kv.cpu_tier_bytes > limit:
            raise ValueError(
                f"kv.cpu_tier_bytes: {self.kv.cpu_tier_bytes.human_readable()} is more than half of this machine's "
                f"memory; use at most {limit} ({limit // 1024**2}MiB)"
            )
        if self.kv.lease_s < self.kv.load_deadline_s:
            raise ValueError(
                f"kv.lease_s: a lease of {self.kv.lease_s} s would end before a load may ({self.kv.load_deadline_s} "
                f"s); use at least {self.kv.load_deadline_s}"
            )


def load_settings(args: Mapping[str, Any] | None) -> Settings:
    """The settings in `args`, every one checked.

    Raises:
        SettingsError: one sentence that names the wrong field and says what would work.
    """
    try:
        return Settings.model_validate(dict(args or {}))
    except ValidationError as error:
        raise SettingsError(one_sentence(error, Settings)) from None


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
