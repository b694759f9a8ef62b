"""The settings of the HTTP surface: who may ask, how much, and how long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator

from configs.secret.api_keys import DIGEST_PREFIX, FARTHEST_PRIORITY, ApiKey, key_digest
from configs.section import Section

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+(?<!:)")

HostName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$")]


class HTTPSettings(Section):
    """The HTTP surface: who may ask, how much, and how long."""

    api_keys: dict[str, str | ApiKey] = Field(
        default_factory=dict,
        repr=False,
        description="From each API key, or its digest as `sha256:…`, to a tenant or to `{tenant: …, admin: true}`, "
        "with `priority: N` to bound its requests' `priority`. Tenants share no KV. `secrets_file` and the environment "
        "variable `CROSSKV_API_KEYS`, as YAML or JSON, may hold more. Empty: no key needed, one tenant.",
    )
    metrics_key: str | None = Field(
        None,
        repr=False,
        description="A key, or its digest as `sha256:…`, that opens `GET /metrics` and nothing else. Keys with `admin` "
        "open it too. On a server without keys that is bound to loopback, it is open to this machine.",
    )
    insecure: bool = Field(
        False, description="Let a server without `api_keys` be reached from other machines, by everybody."
    )
    host_names: list[HostName] = Field(
        default_factory=list,
        description="Names, such as `llm.example.org`, that clients of a server without keys call it by, in `Host`; "
        "others are answered 403. Loopback always passes; beyond loopback every address does.",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Requests per minute of each tenant; more are answered 429. Empty: no limit."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens per minute of each tenant, prompts and answers; more are answered 429. Empty: no limit.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(10 * 1024**2), ge=1024, description="Largest request body; more is answered 413."
    )
    model_aliases: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list,
        description="Other names by which clients may call the model, such as `claude-haiku-*`: `*` is any text, `?` "
        "any character. They share its KV.",
    )
    drop_media: bool = Field(
        False,
        description="Take media in messages before the last one, and in what tools returned: a sentence stands in "
        "their place. Otherwise they are answered 400.",
    )
    max_ongoing_requests: int = Field(512, ge=1, description="Requests that the ingress works on at the same time.")
    max_queued_requests: int = Field(
        256, ge=0, description="Requests that may wait for a replica; more are answered 429."
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest time for a request that is not streamed, and longest silence of a stream: in the queue, "
        "while its prompt is computed, and between two tokens.",
    )
    drain_s: float = Field(
        120.0,
        ge=0,
        description="How long a stopping server, or a replica that a new deployment replaces, goes on with its running "
        "answers. What is left then is ended.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins, such as `https://chat.example.org`, whose pages may use this server from a browser "
        "(CORS). `*`: every page, on a server with keys. Empty: none.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="The server's log: lines of text, or JSON objects that name the request.",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        repr=False,  # may hold a password
        description="Where the ingress sends a trace of each prompt, by OTLP over HTTP, such as "
        "`http://127.0.0.1:4318/v1/traces`. Spans hold times and counts, and no text. Empty: no traces.",
    )
    splice_answers: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Put an answer's sampled tokens into the conversation's next prompt where its text comes back "
        "(docs/concepts/routing.md). `auto`: where the model's chat template is append-only.",
    )
    answer_memory_bytes: ByteSize = Field(
        ByteSize(64 * 1024**2),
        ge=1024**2,
        description="Memory of the ingress for the tokens of sampled answers, some 4 bytes each. 5/16 as much more "
        "is for how long the answers to earlier prompts were, 1,000 bytes a prompt, in equal parts for the tenants.",
    )

    @property
    def answer_lengths_bytes(self) -> int:
        """Memory of the ingress for how long the answers to earlier prompts were."""
        return self.answer_memory_bytes * 5 // 16

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants with a key. Empty: every client may ask, and there are no tenants."""
        return tuple(sorted({whom.tenant for whom in self.keys.values()}))

    @property
    def keys(self) -> dict[str, ApiKey]:
        """The tenant and rights of each key, by the key's digest (`sha256:…`)."""
        return {
            key_digest(key): ApiKey(tenant=whom) if isinstance(whom, str) else whom
            for key, whom in self.api_keys.items()
        }

    @property
    def plain_key(self) -> str | None:
        """A key known in plain text, an administrator's if there is one, for tools that run next to the server."""
        plain = [key for key in self.api_keys if not key.startswith(DIGEST_PREFIX)]
        admins = [key for key in plain if self.keys[key_digest(key)].admin]
        return next(iter(admins or plain), None)

    @field_validator("api_keys", mode="before")
    @classmethod
    def _priorities_can_be_sent(cls, value: Any) -> Any:
        for whom in value.values() if isinstance(value, Mapping) else ():
            priority = whom.get("priority", 0) if isinstance(whom, Mapping) else 0
            if type(priority) is not int or abs(priority) > FARTHEST_PRIORITY:
                raise ValueError(
                    f"a key's `priority` must be a whole number from {-FARTHEST_PRIORITY} to {FARTHEST_PRIORITY}"
                )
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_can_be_told_apart(cls, value: dict[str, str | ApiKey]) -> dict[str, str | ApiKey]:
        digests: dict[str, ApiKey] = {}
        for key, whom in value.items():
            if isinstance(whom, str) and not whom.strip():
                raise ValueError("an API key or its tenant is empty; write each as `some-key: some-tenant`")
            try:
                speaks_for = ApiKey(tenant=whom) if isinstance(whom, str) else whom
            except ValidationError:
                raise ValueError(
                    "a tenant's name is not 1 to 64 printable characters; write it as `some-tenant`"
                ) from None
            if digests.setdefault(key_digest(key), speaks_for) != speaks_for:
                raise ValueError("one key, plain and as its digest, stands for two; leave it in once")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_what_browsers_send(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    "an origin is a scheme, a host and at most a port, in small letters and without a path, such as "
                    "`https://chat.example.org` or `http://localhost:3000`"
                )
        return value

    @field_validator("metrics_key")
    @classmethod
    def _metrics_key_is_one(cls, value: str | None) -> str | None:
        if value is not None:
            key_digest(value)
        return value

    def check_together(self) -> None:
        """Raise ValueError, which names the field, for settings that do not fit together."""
        room = self.max_ongoing_requests
        if len(self.tenants) > room:
            raise ValueError(
                f"http.max_ongoing_requests: {len(self.tenants)} tenants cannot each have room among {room} requests; "
                f"use at least {len(self.tenants)}"
            )
        if "*" in self.cors_origins and not self.keys:
            raise ValueError(
                "http.cors_origins: '*' would let every web page use a server without keys; name the origins, or set "
                "http.api_keys"
            )
        if self.metrics_key is not None and key_digest(self.metrics_key) in self.keys:
            raise ValueError("http.metrics_key: it is a tenant's key too, and would open more; make one of its own")
