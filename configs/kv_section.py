"""The settings of the shared KV cache: what is kept, where, and how long anything may wait for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator

from configs.own_folder import in_project, own_folder
from configs.removed import OF_LOAD_PATHS
from configs.section import Section, word_of_yaml

EMBEDDED_REDIS = "embedded"
"""Value of `kv.redis_url`: the server starts a Redis of its own."""
EXTERNAL_REDIS = "external"
"""Value of `kv.redis_url` in processes that are not told where an external Redis is."""

Fidelity = Literal["exact", "tolerant", "blended"]

MOST_GHOSTS = 100_000
TIER_BYTES_PER_GHOST = 20_000
"""Some 400 bytes remember an evicted segment: at most a fiftieth of what the tiers hold."""

REDIS_NAMESPACE = r"[A-Za-z0-9._-]{1,64}"
"""Nothing that means something in a key or in SCAN's patterns."""


LEAST_REDIS_DEADLINE_S = 0.5
"""A large copy over a network needs it, however short loads are to be."""

GROUPS = 8
"""Groups of layers that a model has: an eighth is what cannot hide."""


class LayerwiseSettings(Section):
    """Layerwise transfer: KV moves a group of layers at a time, while the engine computes the others."""

    enabled: Literal["auto", "on", "off"] = Field(
        "auto",
        description="`auto`: load layerwise where that hides more than loading whole prefixes, and save layerwise on "
        "CUDA. `on`: wherever a tier can bring layers. `off`: never.",
    )

    @field_validator("enabled", mode="before")
    @classmethod
    def _enabled_may_be_unquoted(cls, value: Any) -> Any:
        return word_of_yaml(value)

    def saves(self, on_cuda: bool) -> bool:
        """Whether KV is saved layerwise too. On the CPU backend that brings nothing (docs/concepts/loading.md)."""
        return self.enabled == "on" or (self.enabled == "auto" and on_cuda)

    def layers_per_group(self, layers: int) -> int:
        """Return the number of layers that move together, for a model with `layers` layers."""
        return max(1, layers // GROUPS)


class KVSettings(Section):
    """The shared KV cache: what is kept, where, and how long anything may wait for it."""

    enabled: bool = Field(True, description="Share KV between replicas. Off: every request computes its whole prompt.")
    processor: str | None = Field(
        None,
        min_length=1,
        description="Kind of the processors whose KV is shared, such as `vec, AVX2`: the last bits of KV depend on it. "
        "Empty: that of the node where the server is started.",
    )
    segment_tokens: int = Field(
        256,
        ge=1,
        description="Tokens per segment, the unit that is stored, moved and evicted. A multiple of the block size.",
    )
    cpu_tier_bytes: ByteSize = Field(
        ByteSize(1024**3),
        ge=0,
        description="Budget of the CPU tier on each node. Best no less than the node's device pools: KV reaches Redis "
        "through it. 0: no CPU tier.",
    )
    redis_url: str | None = Field(
        EMBEDDED_REDIS,
        repr=False,  # may hold a password
        description="`embedded`: the server starts a Redis of its own. `redis://host:6379/0`, `rediss://…` (TLS) or "
        "`unix://path`: yours. `null`: no Redis tier.",
    )
    redis_required: bool = Field(
        False, description="Refuse to start without a usable Redis. Off: go on with two tiers, and `/health` says so."
    )
    redis_bytes: ByteSize = Field(
        ByteSize(1024**3), gt=0, description="Budget of KV in Redis. On this machine when Redis is embedded."
    )
    redis_folder: str = Field(
        ".crosskv/redis",
        min_length=1,
        description="Folder (relative to the project) for the data of an embedded Redis and for the server's "
        "secret (docs/guide/redis.md).",
    )
    redis_namespace: str = Field(
        "default",
        description="First part of every name in Redis: letters, digits, `.`, `_`, `-`. Servers that share a Redis "
        "need a namespace each.",
    )
    redis_min_uses: float = Field(
        1.0,
        ge=1,
        description="Uses after which a segment is copied to Redis in the background. 1: every segment.",
    )
    redis_expire_s: int = Field(
        604_800, ge=0, description="Time after which Redis forgets a segment that was not used. 0: never."
    )
    redis_encrypt: bool = Field(
        False,
        description="Encrypt KV that goes to Redis: AES-256-GCM under the server's secret (docs/guide/redis.md). "
        "What lies there already stays readable.",
    )
    redis_codec: Literal["lossless", "raw"] | None = Field(
        None,
        description="How KV is stored in Redis. `lossless`: entropy-coded, and bit by bit the same when it is read. "
        "`raw`: as it lies in memory. Empty: `raw` for an embedded Redis with engines that compute on the CPU, which "
        "coding would take time from; else `lossless`.",
    )
    tolerant_level: int = Field(
        2,
        ge=1,
        le=3,
        description="Level of CacheGen's codec, by which KV of tolerant prompts is stored in Redis: 1 loses least, 3 "
        "takes least room. KV of exact prompts never is.",
    )
    sparse: Literal["off", "layers", "75", "50", "20"] = Field(
        "off",
        description="Of how many tokens KV of tolerant prompts is kept in Redis. `layers`: of each layer what "
        "`make profile-sparse` has measured, without measured loss. `75`, `50`, `20`: this percentage of each layer, "
        "with the loss in docs/concepts/compression.md. `off`: all.",
    )
    load_paths: list[Literal["states", "sparse", "blend", "preempted"]] = Field(
        ["states", "sparse", "blend", "preempted"],
        description="Ways of loading KV, other than whole prefixes. `states`: prefixes of models with states. "
        "`sparse`: sparse prefixes. `blend`: chunks at any place. `preempted`: the KV of preempted requests. "
        "Without one, KV is loaded whole, or computed. `kv.layerwise.enabled` adds one.",
    )
    prefetch_workers: int = Field(
        2, ge=1, le=64, description="Processes per node that copy between Redis and the CPU tier."
    )
    save_answers: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Keep the KV of generated tokens too, for the conversation's next turn. `auto`: of answers such as "
        "come back.",
    )
    load_deadline_s: float = Field(
        2.0,
        gt=0,
        description="Longest wait for a load, on top of three times what its bytes should take "
        "(docs/concepts/loading.md). Whatever has not come by then is computed. The plan may take an eighth of it. A "
        "segment may take a quarter, as much more where Redis has it, at least 0.5 s, and 15 ms for each of its MB.",
    )
    lease_s: float = Field(
        30.0,
        gt=0,
        description="How long a planned segment is safe from eviction, on top of the time that its load may take, and "
        "longest time that a save may take. At least `load_deadline_s`.",
    )
    load_or_recompute: Literal["auto", "load", "recompute"] = Field(
        "auto",
        description="How much of a prompt's stored KV is loaded. `auto`: as much as brings the first token soonest, by "
        "measured rates (docs/concepts/loading.md). `load`: all. `recompute`: none, though KV is still stored.",
    )
    device_policy: Literal["hotness", "lru"] = Field(
        "hotness",
        description="Which KV leaves a full device first (docs/concepts/eviction.md). `hotness`: what was used once, "
        "then what came back, last what is hot. `lru`: what was used least recently, vLLM's own order.",
    )
    eviction_policy: str = Field(
        "lfu",
        min_length=1,
        description="Which segments leave a full tier first (docs/concepts/eviction.md). `lfu`: those expected to be "
        "used least, as learned. `decayed-lfu`: used least, old uses fading. `lru`: used least recently. "
        "`module:Class`: a policy of yours.",
    )
    pin_budget_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        ge=0,
        description="Most KV that may be pinned (`POST /api/v1/kv/pin`). 0: nothing can be pinned.",
    )
    fidelity: Fidelity = Field(
        "exact",
        description="Which KV prompts are answered with, unless their tenant or the request says. `exact`: bit by bit "
        "what the model computes. `tolerant`: also what was stored with loss (docs/concepts/compression.md). "
        "`blended`: also that of chunks which stood elsewhere, partly recomputed (docs/concepts/blending.md).",
    )
    ttft_target_s: float | None = Field(
        None,
        gt=0,
        description="When a tolerant prompt's first token should be there. A load that would miss it ends, and the "
        "rest is computed where that is faster. Empty: a load has `load_deadline_s`.",
    )
    layerwise: LayerwiseSettings = Field(
        default_factory=LayerwiseSettings, description="KV that moves layer by layer, under the computation."
    )

    @property
    def plan_deadline_s(self) -> float:
        """Longest wait for the manager's plan. Then the prompt is computed."""
        return self.load_deadline_s / 8

    @property
    def tier_deadline_s(self) -> float:
        """Longest wait within a load for the next segment, which its bytes and Redis lengthen."""
        return self.load_deadline_s / 4

    @property
    def redis_deadline_s(self) -> float:
        """Longest wait for one answer of Redis, of a load or of a copy: short loads do not make slow copies fail."""
        return min(self.load_deadline_s, max(LEAST_REDIS_DEADLINE_S, self.load_deadline_s / 4))

    @property
    def max_ghosts(self) -> int:
        """Evicted segments whose use count is remembered: fewer for small tiers, whose history is soon old."""
        tiers_bytes = self.cpu_tier_bytes + (self.redis_bytes if self.redis_url is not None else 0)
        return min(MOST_GHOSTS, tiers_bytes // TIER_BYTES_PER_GHOST)

    @property
    def redis_folder_path(self) -> Path:
        """`redis_folder` as an absolute path; nothing is created."""
        return in_project(self.redis_folder)

    @property
    def codec_profiles_path(self) -> Path:
        """Folder of the codec profiles that `make profile-codec` writes, as an absolute path; nothing is created."""
        return own_folder() / "profiles"

    @property
    def redis_embedded(self) -> bool:
        """Whether the server starts a Redis of its own."""
        return self.redis_url == EMBEDDED_REDIS

    @property
    def redis_form(self) -> tuple[str, str] | None:
        """Form in Redis of tolerant segments, and its level, where it is not dense; None: all are dense."""
        return None if self.sparse == "off" else ("sparse", self.sparse)

    @field_validator("load_paths", mode="before")
    @classmethod
    def _layerwise_has_a_setting_of_its_own(cls, value: Any) -> Any:
        if isinstance(value, list) and "layerwise" in value:
            raise ValueError(OF_LOAD_PATHS["layerwise"])
        return value

    @field_validator("sparse", mode="before")
    @classmethod
    def _sparse_may_be_unquoted(cls, value: Any) -> Any:
        return word_of_yaml(value)

    @field_validator("redis_namespace")
    @classmethod
    def _namespace_is_a_plain_name(cls, value: str) -> str:
        if not re.fullmatch(REDIS_NAMESPACE, value):
            raise ValueError(
                f"{value!r} is not 1 to 64 letters, digits, '.', '_' and '-'; use a name such as 'default'"
            )
        return value
