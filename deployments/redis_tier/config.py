"""The Redis tier's configuration, and a check before its start that it can work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.own_folder import why_not_writable
from configs.settings import Settings, SettingsError
from deployments.redis_tier.entries import namespace_root, segment_prefix
from deployments.redis_tier.folder import RedisFolder
from deployments.redis_tier.server import find_redis_server
from deployments.segment_store.endpoint import RedisEndpoint
from deployments.segment_store.redis_connection import (
    RedisUnavailableError,
    check,
    connect,
    require_writes,
    server_name,
)
from deployments.segment_store.segment_codecs import CACHEGEN, RAW_CODING, Coding, FormLevel
from kvmanager.segments.server_secret import ServerSecret

EMBEDDED = "embedded"
CHECK_DEADLINE_S = 3.0
"""For each answer of a Redis that is required."""
GLANCE_DEADLINE_S = 0.8
"""Of one that is not: the start does not wait for it."""
MAXMEMORY_SHARE = 0.8
"""Of an external Redis' maxmemory that segments may fill; the rest is its overhead."""


@dataclass(frozen=True, slots=True)
class RedisTimes:
    """Intervals of the Redis tier's periodic work, in seconds."""

    heartbeat_s: float = 0.5
    first_heartbeat_s: float = 0.2
    """Until the fingerprint is known: the first replica is about to register."""
    probe_every_s: float = 0.5
    retry_s: float = 0.5
    """After the first failure; twice as long after each one more."""
    longest_retry_s: float = 5.0
    profile_renewal_s: float = 600.0
    """How often the codec profiles are kept from expiring, though nothing is coded with them."""


USUAL_TIMES = RedisTimes()


@dataclass(frozen=True, slots=True)
class RedisTierConfig:
    """`url` is "embedded" or a URL; `folder` is absolute and used by the embedded server only; sizes in bytes.

    `app_name` is empty where Serve knows it: in an actor that belongs to a deployment.
    """

    app_name: str
    url: str = field(repr=False)  # it may hold a password
    folder: str
    namespace: str
    budget_bytes: int
    expire_s: int
    deadline_s: float
    coding: Coding = RAW_CODING
    """Without the profile of `model`, which is looked for in `profiles_folder` (absolute; empty: nowhere)."""
    profiles_folder: str = ""
    model: str = ""
    encrypt: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisTierConfig | None:
        """Pick it out of the settings; None when there is no Redis tier."""
        kv = settings.kv
        if not kv.enabled or kv.redis_url is None:
            return None
        return cls(
            app_name="",
            url=kv.redis_url,
            folder=str(kv.redis_folder_path),
            namespace=kv.redis_namespace,
            budget_bytes=int(kv.redis_bytes),
            expire_s=kv.redis_expire_s,
            deadline_s=kv.redis_deadline_s,
            encrypt=kv.redis_encrypt,
            coding=Coding(
                settings.redis_codec,
                CACHEGEN,
                kv.tolerant_level,
                form=None if kv.redis_form is None else FormLevel(*kv.redis_form),
            ),
            profiles_folder=str(kv.codec_profiles_path),
            model=settings.model_source,
        )

    def endpoint(self, url: str, fingerprint: bytes, secret: ServerSecret, profile: bytes) -> RedisEndpoint:
        """Where the segments of the model `fingerprint` lie in the Redis at `url`; `profile`: its digest, or empty.

        Raises ValueError for a namespace that cannot be part of a key.
        """
        return RedisEndpoint(
            url=url,
            prefix=segment_prefix(self.namespace, fingerprint),
            fingerprint=fingerprint,
            deadline_s=self.deadline_s,
            expire_s=self.expire_s,
            secret=secret,
            encrypt=self.encrypt,
            coding=replace(self.coding, profile=profile, model="" if self.coding.form is None else self.model),
        )

    @property
    def embedded(self) -> bool:
        """Whether this deployment has a Redis of its own."""
        return self.url == EMBEDDED

    def budget_below(self, maxmemory_bytes: int) -> int:
        """The bytes of segments that a Redis with this maxmemory (0: none) can be given."""
        if self.embedded or not maxmemory_bytes:
            return self.budget_bytes
        return min(self.budget_bytes, int(MAXMEMORY_SHARE * maxmemory_bytes))


def check_now(config: RedisTierConfig, deadline_s: float = CHECK_DEADLINE_S) -> str | None:
    """Return why this configuration cannot work at the moment, in one sentence that says what to do; None if it can.

    Blocks: for a URL one connection with `deadline_s` per answer, for the embedded server a look at program and
    folder. Whether the folder is in use is not asked: it is while an application is redeployed.
    """
    try:
        root = namespace_root(config.namespace)
        if config.embedded:
            find_redis_server()
            if why := why_not_writable(Path(config.folder)):
                return RedisFolder(Path(config.folder)).refusal(why)
        else:
            client = connect(config.url, deadline_s)
            try:
                check(client, config.url, root)
                require_writes(client, config.url, root)
            finally:
                client.close()
    except (RedisUnavailableError, ValueError) as error:
        return str(error)
    return None


def require_redis(settings: Settings) -> tuple[str, bool]:
    """Say, in words, which Redis there is, and whether it can be used now. May block.

    Raises SettingsError, in one sentence, for a URL that is none, and where `kv.redis_required` is set and Redis cannot
    be used.
    """
    config = RedisTierConfig.from_settings(settings)
    if config is None:
        return "no Redis", True
    if not config.embedded:
        try:
            connect(config.url, GLANCE_DEADLINE_S).close()
        except RedisUnavailableError as error:
            raise SettingsError(f"{error}.") from None
    required = settings.kv.redis_required
    problem = check_now(config, CHECK_DEADLINE_S if required else GLANCE_DEADLINE_S)
    if problem is None:
        return "embedded" if config.embedded else f"{server_name(config.url)} takes reads and writes", True
    if required:
        raise SettingsError(f"kv.redis_required: {problem}.")
    return f"kv.redis_url: {problem}. The server starts without it (kv.redis_required is false).", False
