"""The sections engine, routing, scaling, roles and tenants of the settings tree; `kv_section`, `http_section` and
`blending` hold the others.

`configs.settings` joins and cross-checks them.

A field's name carries its unit (`_bytes`, `_s`, `_tokens`); its description is what docs/guide/settings.md prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from configs.engine_arguments import check_extra_args
from configs.kv_section import Fidelity
from configs.lora_adapters import LoraAdapter, read_adapters
from configs.section import Section

MOST_NAME_CHARS = 256
"""Of an adapter's name."""
CPU_BLOCK_MULTIPLE_TOKENS = 32  # vLLM's CPU attention kernels work on blocks of a multiple of 32 tokens


class EngineSettings(Section):
    """The vLLM engine inside each replica."""

    process: Literal["thread", "process"] | None = Field(
        None,
        description="Where a replica's engine computes. `thread`: in the replica's process. `process`: in one of its "
        "own. Answers are the same. Empty: `thread` on CPU, `process` on CUDA.",
    )
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
        description="Most tokens that one engine step computes; longer prompts are prefilled in chunks. Empty: 512 on "
        "CPU, 2048 on CUDA, or `max_num_seqs` where that is more.",
    )
    enforce_eager: bool = Field(
        True,
        description="Skip compilation, and start in seconds. Off: start in half a minute, and compute tokens faster.",
    )
    threads: int = Field(
        1, ge=1, description="OpenMP threads per replica (CPU backend). Replicas times threads: at most the cores."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Processes over which each replica's model is spread, each with a share of the heads, on one node "
        "(docs/concepts/models.md). On CPUs only. Each has `threads` threads.",
    )
    scheduler: Literal["fcfs", "shortest", "mlfq"] = Field(
        "fcfs",
        description="Which request runs next where more wait than `max_num_seqs` (docs/concepts/scheduling.md). "
        "`fcfs`: the first that came. `shortest`: the one that is expected to need least. `mlfq`: the one that has had "
        "least so far.",
    )
    tpot_target_s: float | None = Field(
        None,
        gt=0,
        description="Longest wait of a decoding request for its next token while long prompts are prefilled, in "
        "smaller parts. Empty: a step computes up to `max_num_batched_tokens`.",
    )
    hang_s: float = Field(
        10.0,
        ge=1.0,
        description="A step that takes this many seconds more than four times the slowest of its size is hung: its "
        "replica is replaced. Raise it where the machine itself stands still for seconds.",
    )
    tool_call_parser: str | None = Field(
        None,
        min_length=1,
        description="vLLM's parser for the model's tool calls, such as `hermes`. With one, the model may choose "
        "whether it calls a tool. Empty: none.",
    )
    tool_strict_level: Literal["auto", "forced", "function", "parameter"] = Field(
        "forced",
        description="Whose arguments fit their tool's schema. `auto`: of tools that say `strict`. `forced`: also of "
        "calls that a request forces (`tool_choice`). `function`: the envelope of every call. `parameter`: and all "
        "schemas, for which requests with many tools wait.",
    )
    reasoning_parser: str | None = Field(
        None,
        min_length=1,
        description="vLLM's parser for the model's reasoning, such as `qwen3`. Empty: reasoning stays in the answer.",
    )
    json_whitespace: int | None = Field(
        8,
        ge=1,
        description="Most characters of whitespace in a row between two parts of a JSON answer or of a tool call's "
        "arguments. Empty: no bound.",
    )
    lora_adapters: dict[str, LoraAdapter] = Field(
        default_factory=dict,
        description="Folders of LoRA adapters, by the name that clients ask for (docs/concepts/models.md).",
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,  # may hold a hub's token
        description="Anything else for vLLM's AsyncEngineArgs, by vLLM's own names. "
        "What would undo the exactness of shared KV is refused.",
    )

    @property
    def auto_tool_choice(self) -> bool:
        """Whether the model may choose to call a tool."""
        return self.tool_call_parser is not None

    @field_validator("lora_adapters", mode="before")
    @classmethod
    def _a_folder_is_an_adapter(cls, value: Any) -> Any:
        return read_adapters(value)

    @field_validator("lora_adapters")
    @classmethod
    def _adapters_have_names(cls, value: dict[str, LoraAdapter]) -> dict[str, LoraAdapter]:
        for name in value:
            if not 1 <= len(name) <= MOST_NAME_CHARS or not name.isprintable():
                raise ValueError(
                    f"{name[:60]!r} cannot be asked for; use a name of 1 to {MOST_NAME_CHARS} printable characters"
                )
        return value

    @model_validator(mode="after")
    def _forced_calls_can_be_constrained(self) -> EngineSettings:
        constraints = self.extra_args.get("structured_outputs_config")
        backend = constraints.get("backend") if isinstance(constraints, dict) else None
        if self.tool_call_parser is not None and backend not in (None, "auto", "xgrammar"):
            raise ValueError(
                f"extra_args.structured_outputs_config.backend {backend!r} knows no grammar for tool calls; use 'auto' "
                "or 'xgrammar', or leave tool_call_parser empty"
            )
        return self

    @field_validator("extra_args")
    @classmethod
    def _extra_arguments_undo_nothing(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_extra_args(value)
        return value


class RoutingSettings(Section):
    """The work that a prompt leaves at a replica, in tokens of prefill; docs/concepts/routing.md has the formula."""

    rebalance_streams: bool = Field(
        False,
        description="Move long streams from a replica that is short of KV to one that has room (Llumnix). The client "
        "sees a pause; tokens stay the same.",
    )


class ReplicaBounds(Section):
    """Bounds on the number of replicas; Ray Serve starts and ends them by their load."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)


class ScalingSettings(Section):
    """When the number of replicas follows the load; without effect where `replicas` is a number."""

    ttft_target_s: float = Field(
        2.0,
        gt=0,
        description="Wanted time to the first token; more replicas start when waiting prompts take half of it.",
    )
    upscale_delay_s: float = Field(
        30.0, ge=0, description="More replicas must be needed for this time. Below 30, replicas also report more often."
    )
    downscale_delay_s: float = Field(
        600.0, ge=0, description="One replica less must be enough for this time. With each goes the KV on its device."
    )


def replica_count(value: Any) -> int | ReplicaBounds:
    """What `replicas` may be. Raises ValueError, in words that name what works."""
    if isinstance(value, ReplicaBounds):
        return value
    if not isinstance(value, Mapping):
        return _whole(value, "it")
    unknown = sorted(str(name) for name in value if name not in ReplicaBounds.model_fields)
    if unknown or "max" not in value:
        wrong = f"there is no {unknown[0]!r}" if unknown else "max is not given"
        raise ValueError(f"{wrong}; use an integer, or bounds such as {{min: 1, max: 4}}")
    least, most = _whole(value.get("min", 1), "min"), _whole(value["max"], "max")
    if least > most:
        raise ValueError(f"min must be less than or equal to max, {most}, not {least}")
    return ReplicaBounds(min=least, max=most)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, or bounds such as {{min: 1, max: 4}}, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be greater than or equal to 1, not {value}")
    return int(value)


class RolesSettings(Section):
    """Replicas that prefill prompts and replicas that decode answers (docs/concepts/roles.md); off by default."""

    prefill: int = Field(0, ge=0, description="Replicas that prefill. All others decode. 0: no roles.")
    split: Literal["auto", "always"] = Field(
        "auto",
        description="Which prompts are handed over. `auto`: where computing them takes longer than a hand-over, as "
        "measured, and 256 tokens or more are to be computed. `always`: all of which a block or more is to be "
        "computed.",
    )

    @property
    def on(self) -> bool:
        """Whether there are roles."""
        return self.prefill > 0


Quota = Annotated[ByteSize, Field(gt=0)]


class TenantSettings(Section):
    """What one tenant has of its own."""

    cpu_bytes: Quota | None = Field(
        None,
        description="The part of each CPU tier that is its own. It gets no more, and no other tenant gets it. Tenants "
        "without one share the rest.",
    )
    redis_bytes: Quota | None = Field(None, description="The part of Redis that is its own, in the same way.")
    pin_bytes: Quota | None = Field(
        None, description="Its part of `kv.pin_budget_bytes`. The other tenants get equal parts of the rest."
    )
    fidelity: Fidelity | None = Field(
        None, description="Its own `kv.fidelity`, where the request says nothing. Empty: the server's."
    )
    requests_per_minute: int | None = Field(
        None, ge=0, description="Its own `http.requests_per_minute`. 0: no limit. Empty: the server's."
    )
    tokens_per_minute: int | None = Field(
        None, ge=0, description="Its own `http.tokens_per_minute`. 0: no limit. Empty: the server's."
    )
    weight: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="Its share of what is computed while several wait, against the others': 2 gets twice as much as 1. "
        "A sampled token counts as two of a prompt, a reused one almost nothing.",
    )
