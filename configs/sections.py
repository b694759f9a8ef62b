"""The sections of the settings tree: engine, http, routing, faults; `configs.kv_section` has kv, the largest.

`configs.settings` joins and cross-checks them.

A field's name carries its unit (`_bytes`, `_s`, `_tokens`); its description is what docs/settings.md prints.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from configs.engine_arguments import check_extra_args

CPU_BLOCK_MULTIPLE_TOKENS = 32  # vLLM's CPU attention kernels work on blocks of a multiple of 32 tokens


class Section(BaseModel):
    """A section refuses what it does not know and does not change once loaded."""

    # pydantic's own messages quote what was given, which may be a password; `configs.errors` quotes what may be shown.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class EngineSettings(Section):
    """The vLLM engine inside each replica."""

    block_size_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens per KV block. Empty: 32 on CPU (which needs a multiple of 32), 16 on CUDA.",
    )
    device_blocks: int | None = Field(
        None,
        ge=2,
        description="KV blocks in each replica's device pool. Empty: 256 on CPU, what vLLM finds room for on CUDA.",
    )
    max_num_seqs: int = Field(32, ge=1, description="Requests that one replica computes at the same time.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that one engine step computes at most; longer prompts are prefilled in chunks, and others "
        "decode between them. Empty: 512 on CPU, 2048 on CUDA, or `max_num_seqs` where that is more.",
    )
    enforce_eager: bool = Field(
        True,
        description="Skip compilation: starts in seconds; compiled is faster per token and starts in half a minute.",
    )
    threads: int = Field(
        1, ge=1, description="OpenMP threads per replica (CPU backend). Replicas x threads: at most the cores."
    )
    hang_s: float = Field(
        10.0,
        ge=1.0,
        description="A step of the engine hangs, and its replica is replaced, when it takes so much longer than four "
        "times the slowest step of its size so far. Raise it where the machine itself stands still for seconds.",
    )
    log_stats: bool = Field(True, description="Let vLLM count its own metrics, which /metrics then shows.")
    extra_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Anything else for vLLM's AsyncEngineArgs, by vLLM's own names. "
        "What would undo the exactness of shared KV is refused.",
    )

    @field_validator("extra_args")
    @classmethod
    def _extra_arguments_undo_nothing(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_extra_args(value)
        return value


class HTTPSettings(Section):
    """The HTTP surface: who may ask, how much, and how long."""

    api_keys: dict[str, str] = Field(
        default_factory=dict, description="API key to tenant. Tenants share no KV. Empty: no key needed, one tenant."
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(10 * 1024**2), ge=1024, description="Largest request body; more is answered 413."
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="Longest time from a request's headers to the end of its body; more is answered 408."
    )
    constraint_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Longest time to build the grammar of a structured output, a regular expression or a tool call; "
        "what takes longer is answered 400.",
    )
    max_ongoing_requests: int = Field(512, ge=1, description="Requests that the ingress works on at the same time.")
    max_queued_requests: int = Field(
        256, ge=0, description="Requests that may wait for a replica; more are answered 429."
    )
    retry_after_s: int = Field(1, ge=1, description="What `Retry-After` says with a 429 or a 503.")
    request_timeout_s: float = Field(600.0, gt=0, description="Longest time that one request may take.")
    debug_headers: bool = Field(
        False, description="Obey the header `X-CrossKV-Replica: 0|1|…`, which sends a request to one replica."
    )
    tool_call_parser: str | None = Field(
        None, description="vLLM's parser for the model's tool calls, such as `hermes`. Empty: no automatic tool choice."
    )
    reasoning_parser: str | None = Field(
        None,
        description="vLLM's parser for the model's reasoning, such as `qwen3`. Empty: reasoning stays in the answer.",
    )

    @property
    def tenants(self) -> tuple[str, ...]:
        """Who may ask, by name; empty: everybody, and there are no tenants."""
        return tuple(sorted(set(self.api_keys.values())))

    @field_validator("api_keys")
    @classmethod
    def _keys_and_tenants_are_not_empty(cls, value: dict[str, str]) -> dict[str, str]:
        if any(not key.strip() or not tenant.strip() for key, tenant in value.items()):
            raise ValueError("an API key or its tenant is empty; write each as `some-key: some-tenant`")
        return value


class RoutingSettings(Section):
    """The work that a prompt leaves at a replica, in tokens of prefill; docs/architecture.md has the formula."""

    device_credit: float = Field(
        1.0, ge=0, le=1, description="Share of the prefill saved by a token found on the device."
    )
    cpu_credit: float = Field(
        0.75, ge=0, le=1, description="Share of the prefill saved by a token found in the CPU tier."
    )
    redis_credit: float = Field(0.5, ge=0, le=1, description="Share of the prefill saved by a token found in Redis.")
    decode_weight: float = Field(
        1.0, ge=0, description="Prefill tokens that one KV block held by a running request costs a replica."
    )


class FaultSettings(Section):
    """Faults that the server commits on purpose, for tests of a running server. All zero in production."""

    redis_delay_s: float = Field(0.0, ge=0, description="Wait before each answer of Redis.")
    redis_error_share: float = Field(0.0, ge=0, le=1, description="Share of the calls to Redis that fail.")
    redis_corrupt_share: float = Field(
        0.0, ge=0, le=1, description="Share of the segments read from Redis that arrive damaged."
    )
    redis_link_bytes_per_s: float = Field(
        0.0, ge=0, description="Emulated rate of each connection to Redis, in bytes per second. 0: as fast as it is."
    )
    redis_link_delay_s: float = Field(0.0, ge=0, description="Emulated delay of each round trip to Redis.")
    manager_delay_s: float = Field(0.0, ge=0, description="Wait before each answer of the KV manager.")
    manager_lost_share: float = Field(0.0, ge=0, le=1, description="Share of the calls to the KV manager that fail.")
