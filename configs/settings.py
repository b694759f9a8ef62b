"""The settings of crosskv: one tree, validated before anything starts. `args:` in serve_config.yaml is this tree.

The sections lie in `configs.sections`; this file holds what concerns the whole server and the checks across sections.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from configs import machine
from configs.blending import BlendSettings
from configs.errors import SettingsError, one_sentence
from configs.http_section import HTTPSettings
from configs.kv_section import EMBEDDED_REDIS, KVSettings
from configs.model_folder import DEMO_MODEL, PROJECT_ROOT, find_model, is_quantized, own_max_tokens
from configs.presets import require_scenario, with_scenario
from configs.secret.handed_on import with_secrets
from configs.section import Section
from configs.sections import (
    CPU_BLOCK_MULTIPLE_TOKENS,
    EngineSettings,
    ReplicaBounds,
    RolesSettings,
    RoutingSettings,
    ScalingSettings,
    TenantSettings,
    replica_count,
)

__all__ = ["PROJECT_ROOT", "Settings", "SettingsError", "load_settings"]

_LARGEST_TIER_SHARE = 0.5  # of the machine's memory: the replicas and the page cache need the rest
_DEFAULT_BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
# CPU memory is shared by all replicas, so the pool has a fixed size.
_DEFAULT_DEVICE_BLOCKS = {"cpu": 256, "cuda": None}
# docs/measured/experiments.md, 11: enough for each model that was measured, on a CPU; longer steps hold up decoding.
_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 2048}

_DEFAULT_ENGINE_PROCESS: dict[str, Literal["thread", "process"]] = {
    "cpu": "thread",  # docs/measured/overhead.md: a second process costs memory, and two cores are busy computing
    "cuda": "process",  # a GPU's steps are as short as Python's own work; and it is vLLM's own layout
}


class Settings(Section):
    """Everything that can be set, below `args:` in serve_config.yaml."""

    model: str = Field(
        DEMO_MODEL,
        min_length=1,
        description="A folder in Hugging Face's format (relative to the project), or a Hugging Face id.",
    )
    scenario: str | None = Field(
        None,
        description="What the server is for: `chat`, `long-document`, `rag`, `short`, `cross-node` or `cost`. It "
        "chooses defaults of other settings (docs/guide/scenarios.md).",
    )
    secrets_file: str | None = Field(
        None, min_length=1, description="A private file with more settings, which win (docs/guide/keys.md)."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The name that clients ask for. Empty: the model's own."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Type of weights and KV. `auto`: on CUDA, and for a folder's quantized model, vLLM's choice. "
        "On a CPU `bfloat16` where it has instructions for that (AVX-512 BF16, AMX), else `float32`.",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest prompt and answer together. Empty: the model's own limit, or what `device_blocks` hold.",
    )
    chat_template: str | None = Field(
        None, description="A file with a Jinja chat template. Empty: the tokenizer's own."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    replicas: int | ReplicaBounds = Field(
        2,
        description="Engines that serve the model side by side. A number, or bounds such as `{min: 1, max: 4}` between "
        "which it follows the load (docs/guide/starting.md).",
    )
    scaling: ScalingSettings = Field(
        default_factory=ScalingSettings, description="When the number of replicas follows the load."
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="The vLLM engine inside each replica.")
    kv: KVSettings = Field(default_factory=KVSettings, description="The shared KV cache.")
    blending: BlendSettings = Field(default_factory=BlendSettings, description="KV of chunks that are no prefix.")
    http: HTTPSettings = Field(default_factory=HTTPSettings, description="The HTTP surface.")
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict,
        description="What single tenants of `http.api_keys` have of their own, such as `tenants: {acme: {weight: 2, "
        "cpu_bytes: 1GiB}}`.",
    )
    routing: RoutingSettings = Field(default_factory=RoutingSettings, description="How a replica is chosen.")
    roles: RolesSettings = Field(
        default_factory=RolesSettings, description="Replicas that prefill, and replicas that decode."
    )

    @property
    def min_replicas(self) -> int:
        """Minimum number of replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    @property
    def max_replicas(self) -> int:
        """Maximum number of replicas: what machines and queues must have room for."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max

    @property
    def decode_replicas(self) -> int:
        """Replicas whose role is to decode: all that do not prefill; 0 without roles."""
        return self.max_replicas - self.roles.prefill if self.roles.on else 0

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas > self.min_replicas

    @cached_property
    def model_source(self) -> str:
        """The model that vLLM loads: the model folder's absolute path, or the hub id."""
        return str(find_model(self.model))

    @cached_property
    def engine_dtype(self) -> Literal["auto", "bfloat16", "float16", "float32"]:
        """`dtype` for vLLM on this machine. Nodes may differ: the application's is found once, by `app.builder`."""
        if self.dtype != "auto" or machine.accelerator() != "cpu" or is_quantized(find_model(self.model)):
            return self.dtype
        return machine.cpu_dtype()

    @property
    def processor_here(self) -> str:
        """The kind of this node's processors (`kv.processor`); empty where an accelerator computes."""
        return machine.processor_kind(self.engine_dtype) if machine.accelerator() == "cpu" else ""

    @property
    def dtype_said(self) -> str:
        """`engine_dtype` in words, and why."""
        if self.dtype != "auto":
            return self.dtype
        if self.engine_dtype == "auto":
            return "the type that vLLM chooses (dtype: auto)"
        has = "has" if self.engine_dtype == "bfloat16" else "has no"
        return f"{self.engine_dtype} (dtype: auto; this processor {has} instructions for bfloat16)"

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
    def max_num_batched_tokens(self) -> int:
        """Tokens of one engine step at most, with this machine's default filled in; vLLM wants one per sequence."""
        default = max(_DEFAULT_STEP_TOKENS[machine.accelerator()], self.engine.max_num_seqs)
        return self.engine.max_num_batched_tokens or default

    @property
    def engine_process(self) -> Literal["thread", "process"]:
        """Where a replica's engine computes, with this machine's default filled in."""
        return self.engine.process or _DEFAULT_ENGINE_PROCESS[machine.accelerator()]

    @property
    def replica_threads(self) -> int:
        """Threads that compute for one replica on a CPU: those of all its ranks."""
        return self.engine.threads * self.engine.tensor_parallel_size

    @property
    def redis_codec(self) -> Literal["lossless", "raw"]:
        """How exact KV is stored in Redis, with this machine's default filled in: room costs time to compute."""
        takes_from_engine = machine.accelerator() == "cpu" and self.kv.redis_embedded
        return self.kv.redis_codec or ("raw" if takes_from_engine else "lossless")

    @property
    def device_pool_tokens(self) -> int | None:
        """Tokens of the longest request that the device pool holds; vLLM keeps one block for itself, the null block."""
        return None if self.device_blocks is None else (self.device_blocks - 1) * self.block_size_tokens

    def longest_request_tokens(self, models_own_limit: int) -> int:
        """`max_model_len` for vLLM: the setting, else the model's own limit shortened to what the device pool holds."""
        return self.max_model_len or min(models_own_limit, self.device_pool_tokens or models_own_limit)

    def without_shared_kv(self) -> Settings:
        """Return the same settings with KV sharing off, for the parts around an engine whose KV cannot be shared."""
        return self.model_copy(update={"kv": self.kv.model_copy(update={"enabled": False})})

    @property
    def handover_deadline_s(self) -> float:
        """Longest wait for KV to be stored, between a prefill and a decode replica."""
        return self.kv.tier_deadline_s

    @property
    def blocks_per_segment(self) -> int:
        """KV blocks in a full segment."""
        return self.kv.segment_tokens // self.block_size_tokens

    @model_validator(mode="before")
    @classmethod
    def _scenario_fills_what_is_not_set(cls, given: Any) -> Any:
        return with_scenario(given)

    @field_validator("scenario")
    @classmethod
    def _scenario_is_known(cls, value: str | None) -> str | None:
        if value is not None:
            require_scenario(value)
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _replicas_are_a_number_or_bounds(cls, value: Any) -> int | ReplicaBounds:
        return replica_count(value)

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
        self._check_ranks()
        self._check_lengths()
        self._check_waits()
        self._check_roles()
        self._check_rebalancing()
        self._check_redis()
        self._check_budgets()
        self._check_tenants()
        self._check_adapters()
        self.http.check_together()
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

    def _check_ranks(self) -> None:
        ranks = self.engine.tensor_parallel_size
        if ranks == 1:
            return
        if machine.accelerator() != "cpu":
            raise ValueError(
                f"engine.tensor_parallel_size: {ranks} processes would share KV in the memory of GPUs, which no test "
                "has done; set it to 1, and raise replicas"
            )
        if self.engine_process == "process":
            raise ValueError(
                "engine.process: with engine.tensor_parallel_size the model computes in processes of its own already; "
                "set it to thread"
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

    def _check_waits(self) -> None:
        kv = self.kv
        if kv.lease_s < kv.load_deadline_s:
            raise ValueError(
                f"kv.lease_s: a lease of {kv.lease_s} s would end before a load may ({kv.load_deadline_s} s); use at "
                f"least {kv.load_deadline_s}"
            )

    def _check_roles(self) -> None:
        roles = self.roles
        if not roles.on:
            return
        if self.scales:
            raise ValueError(
                "roles: they are shared out among a fixed number of replicas; make replicas a number, or set "
                "roles.prefill to 0"
            )
        if self.decode_replicas < 1:
            raise ValueError(
                f"roles.prefill: none of {self.max_replicas} replicas would decode; use less than {self.max_replicas}, "
                f"or set replicas to at least {roles.prefill + 1}"
            )
        if not self.kv.enabled or not self.kv.cpu_tier_bytes:
            raise ValueError(
                "roles: KV is handed over through the CPU tier, which is off (kv.enabled, kv.cpu_tier_bytes); turn it "
                "on, or set roles.prefill to 0"
            )

    def _check_rebalancing(self) -> None:
        if self.routing.rebalance_streams and not self.kv.enabled:
            raise ValueError(
                "routing.rebalance_streams: streams move by shared KV, which is off (kv.enabled); set both, or this to "
                "false"
            )

    def _check_redis(self) -> None:
        kv = self.kv
        if kv.redis_required and kv.redis_url is None:
            raise ValueError(
                f"kv.redis_required: there is no Redis to require while kv.redis_url is null; set kv.redis_url to "
                f"{EMBEDDED_REDIS!r} or to a URL, or kv.redis_required to false"
            )
        if kv.enabled and kv.redis_url is not None and not kv.cpu_tier_bytes:
            raise ValueError(
                "kv.redis_url: KV reaches Redis through the CPU tier, which has no room (kv.cpu_tier_bytes is 0); set "
                "kv.redis_url to null, or kv.cpu_tier_bytes to some bytes such as 1GiB"
            )

    def _check_budgets(self) -> None:
        """The CPU tier, and a Redis of our own, must leave this machine's memory to the replicas and the page cache."""
        if not self.kv.enabled:
            return
        limit = int(machine.memory_bytes() * _LARGEST_TIER_SHARE)
        tier, redis = self.kv.cpu_tier_bytes, self.kv.redis_bytes
        if not self.kv.redis_embedded:
            if tier > limit:
                raise ValueError(
                    f"kv.cpu_tier_bytes: {tier.human_readable()} is more than half of this machine's memory; use at "
                    f"most {_at_most(limit)}"
                )
        elif tier + redis > limit:
            larger, other = ("cpu_tier_bytes", redis) if tier >= redis else ("redis_bytes", tier)
            works = (
                f"use at most {_at_most(limit - other)} for kv.{larger}"
                if other < limit
                else f"use at most {_at_most(limit // 2)} for each"
            )
            raise ValueError(
                f"kv.{larger}: the CPU tier's {tier.human_readable()} and the embedded Redis's "
                f"{redis.human_readable()} (kv.redis_bytes) are together more than half of this machine's memory; "
                f"{works}"
            )

    def _check_adapters(self) -> None:
        adapters, cached = self.engine.lora_adapters, self.engine.extra_args.get("max_cpu_loras")
        if self.model_name in adapters:
            raise ValueError(
                f"engine.lora_adapters: {self.model_name!r} is the model's own name; call the adapter something else, "
                "or the model by served_model_name"
            )
        if adapters and isinstance(cached, int) and cached < len(adapters):
            raise ValueError(
                f"engine.extra_args: max_cpu_loras {cached} holds fewer than the {len(adapters)} adapters of "
                "engine.lora_adapters, all of which stay in memory; leave it out"
            )

    def _check_tenants(self) -> None:
        known = set(self.http.tenants)
        for tenant in self.tenants:
            if tenant not in known:
                raise ValueError(
                    f"tenants: {tenant!r} is no tenant of http.api_keys; use one of {sorted(known)}"
                    if known
                    else "tenants: no tenant has a key; give each one in http.api_keys first"
                )
        for field, of in (
            ("cpu_bytes", "cpu_tier_bytes"),
            ("redis_bytes", "redis_bytes"),
            ("pin_bytes", "pin_budget_bytes"),
        ):
            quotas: Mapping[str, int] = self.of_tenants(field)
            budget: int = getattr(self.kv, of)
            if sum(quotas.values()) > budget:
                raise ValueError(
                    f"tenants: their {field} add up to {sum(quotas.values())} bytes, more than kv.{of}, {budget} "
                    f"bytes; lower them or raise that"
                )

    def of_tenants(self, field: str) -> dict[str, Any]:
        """What tenants have of one of `TenantSettings`, by name, of those for whom it is set."""
        found = {tenant: getattr(own, field) for tenant, own in self.tenants.items()}
        return {tenant: value for tenant, value in found.items() if value is not None}


def load_settings(args: Mapping[str, Any] | None) -> Settings:
    """The settings in `args`, every one checked, with the secrets that stand elsewhere (`configs.secret`).

    Raises:
        SettingsError: one sentence that names the wrong field and says what would work.
    """
    try:
        return Settings.model_validate(with_secrets(args or {}, os.environ))
    except ValidationError as error:
        raise SettingsError(one_sentence(error, Settings)) from None


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _at_most(limit_bytes: int) -> str:
    """A number of bytes, to be set as it is, and about how much that is."""
    return f"{limit_bytes} ({limit_bytes // 1024**2}MiB)"
