"""All that the rules see: what a server counted since its start, and how it is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LEAST_PROMPTS = 50
"""Of fewer no share is worth an advice: one in ten of them is five prompts."""


@dataclass(frozen=True, slots=True)
class TierFill:
    """Of one tier, on all nodes."""

    nbytes: int
    budget_bytes: int

    @property
    def fill(self) -> float:
        """Share of the budget that is used."""
        return self.nbytes / self.budget_bytes if self.budget_bytes else 0.0


@dataclass(frozen=True, slots=True)
class CodecUse:
    """Of one codec: segments encoded and decoded, and seconds that decoding took in all."""

    encoded: int
    decoded: int
    decoding_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was counted since the server's start. Nothing in here is a setting."""

    plans: Mapping[str, int] = field(default_factory=dict)
    """Prompts by why their KV was loaded or computed (docs/concepts/loading.md)."""
    parted: Mapping[str, int] = field(default_factory=dict)
    """Prompts that lost their whole prefix to a few tokens in front, by what those look like (`app.divergence`)."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens by source: device, cpu, redis, recomputed."""
    ttft_s: float | None = None
    """Mean time to the first token, of streams."""
    load_share: float | None = None
    """Share of all time to first tokens that went into waiting for loads."""
    tiers: Mapping[str, TierFill] = field(default_factory=dict)
    codecs: Mapping[str, CodecUse] = field(default_factory=dict)
    credits: Mapping[str, float] = field(default_factory=dict)
    """By tier, the share of its prefill that a reused token saves, as measured; only what was."""
    refused_demotions: int = 0
    """Segments for which Redis had no room."""
    chunk_tokens: int = 0
    """In prompts that name two chunks or more: tokens of their chunks."""
    device_pool_bytes: int | None = None
    """KV that the largest replica's device holds."""
    nodes: int = 1

    @property
    def prompts(self) -> int:
        """Prompts of which a plan was made, or known why not."""
        return sum(self.plans.values())

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were reused, from wherever."""
        return 1 - self.tokens.get("recomputed", 0) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def enough(self) -> bool:
        """Whether shares of it say something."""
        return self.prompts >= LEAST_PROMPTS


@dataclass(frozen=True, slots=True)
class Setup:
    """How the server is set, as GET /api/v1/settings or a settings file says. None: not known, or empty."""

    kv_enabled: bool = True
    accelerator: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    """Of the ingress's machine, as `cores`."""
    shared_memory_bytes: int | None = None
    """That is free for Ray's object store."""
    replica_bytes: Mapping[str, int] = field(default_factory=dict)
    """By dtype, a replica's main memory."""
    cpu_dtype: str | None = None
    """What the processor computes fast: bfloat16 or float32."""
    dtype: str | None = None
    threads: int | None = None
    ranks: int = 1
    """Processes over which each replica's model is spread; each has `threads`."""
    replicas: int | None = None
    """At most."""
    least_replicas: int | None = None
    roles: bool = False
    tenants: int = 0
    block_tokens: int | None = None
    device_blocks: int | None = None
    kv_bytes_per_token: int | None = None
    layerwise: str | None = None
    separators: Sequence[object] | None = None
    """Texts, or lists of token ids."""
    page_tokens: Sequence[int] | None = None
    """A page of ordinary text as the model's tokens; None: it was not asked for, or could not be had."""
    fidelity: str = "exact"
    tenant_fidelity: Mapping[str, str] = field(default_factory=dict)
    redis: str | None = None
    """`embedded`, `external`, or None: there is none."""
    redis_required: bool = False
    redis_codec: str | None = None
    form_level: str | None = None
    """Of the form in which Redis has tolerant KV; `off`: all is dense."""
    redis_bytes: int | None = None
    redis_expire_s: int | None = None
    redis_min_uses: float | None = None
    cpu_tier_bytes: int | None = None
    tenant_cpu_bytes: Mapping[str, int] = field(default_factory=dict)
    load_or_recompute: str | None = None
    prefetch_workers: int | None = None
    ttft_target_s: float | None = None
    """Wanted time to the first token."""

    @property
    def separators_of_tokens(self) -> bool:
        """Whether there are separators that only the model's tokenizer can read."""
        return any(isinstance(one, list) for one in self.separators or ())


@dataclass(frozen=True, slots=True)
class Figures:
    """`setup` is None where the server's settings are unknown; the rules that need them are silent then."""

    traffic: Traffic = field(default_factory=Traffic)
    setup: Setup | None = None
