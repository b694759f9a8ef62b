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
    """Prompts that lost their whole prefix to a few tokens in front, by what those look like (`app.partings`)."""
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
    """In blended prompts with two chunks or more: tokens of their chunks."""
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
    cpu_dtype: str | None = None
    """What the processor computes fast: bfloat16 or float32."""
    dtype: str | None = None
    threads: int | None = None
    replicas: int | None = None
    block_tokens: int | None = None
    device_blocks: int | None = None
    layers: int | None = None
    kv_bytes_per_token: int | None = None
    longest_request_tokens: int | None = None
    layerwise: str | None = None
    layerwise_buffer_bytes: int | None = None
    layers_per_group: int | None = None
    separators: Sequence[object] | None = None
    fidelity: str = "exact"
    tenant_fidelity: Mapping[str, str] = field(default_factory=dict)
    redis: str | None = None
    """`embedded`, `external`, or None: there is none."""
    redis_codec: str | None = None
    tolerant_codec: str | None = None
    sparse: str | None = None
    redis_bytes: int | None = None
    redis_expire_s: int | None = None
    redis_min_uses: float | None = None
    cpu_tier_bytes: int | None = None
    load_or_recompute: str | None = None
    prefetch_workers: int | None = None
    ttft_target_s: float | None = None
    """Wanted time to the first token."""

    def cpu_tier_within(self, nbytes: int) -> int | None:
        """So many bytes for the CPU tier, or as many as a server with this memory starts with; None: it has those."""
        beside = (self.redis_bytes or 0) if self.redis == "embedded" else 0
        return self._within(nbytes, beside, self.cpu_tier_bytes or 0)

    def redis_within(self, nbytes: int) -> int | None:
        """The same for Redis, whose memory is this machine's only where it is embedded."""
        if self.redis != "embedded":
            return nbytes
        return self._within(nbytes, self.cpu_tier_bytes or 0, self.redis_bytes or 0)

    def _within(self, nbytes: int, beside: int, now: int) -> int | None:
        if self.memory_bytes is None:
            return nbytes
        # What `configs.settings` refuses above: half of the memory for both; in whole MiB
        most = (self.memory_bytes // 2 - beside) // 1024**2 * 1024**2
        return min(nbytes, most) if most > now else None


@dataclass(frozen=True, slots=True)
class Figures:
    """`setup` is None where nobody says how the server is set; the rules that need it are silent then."""

    traffic: Traffic = field(default_factory=Traffic)
    setup: Setup | None = None
