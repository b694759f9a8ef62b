"""API keys: what one may be given as, and the two places that they may come from.

A key stands in `http.api_keys`, perhaps those of `secrets_file`, or in the environment variable `CROSSKV_API_KEYS`.
Both hold the same mapping, the last one as YAML or JSON: a key, or its SHA-256 digest as `sha256:` and 64 hex
digits, to the name of a tenant, or to `{tenant: name, admin: true, priority: 0}`.

No message here shows a key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import Field, field_validator

from configs.errors import SettingsError
from configs.section import Section

KEYS_VARIABLE = "CROSSKV_API_KEYS"
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_TENANT = 64
FARTHEST_PRIORITY = 1_000_000
"""From 0, of what a request's `priority` becomes."""


class ApiKey(Section):
    """The tenant and rights of an API key."""

    tenant: str = Field(min_length=1, max_length=_LONGEST_TENANT, description="The tenant. Tenants share no KV.")
    admin: bool = Field(False, description="Whether it may see and change what belongs to all tenants.")
    priority: int = Field(
        0,
        description="The least `priority` that its requests may have: engines that heed it compute lower numbers "
        "first. An administrator's requests may have any.",
    )

    @field_validator("tenant")
    @classmethod
    def _name_can_be_shown(cls, value: str) -> str:
        if value != value.strip() or not value.isprintable():
            raise ValueError("a tenant's name must be printable, without spaces around it; write it as `some-tenant`")
        return value


def key_digest(key: str) -> str:
    """`sha256:…` of a key; of what is such a digest, itself.

    Raises ValueError, which does not show it, for what begins like a digest and is none, and for an empty key.
    """
    if not key.strip():
        raise ValueError("a key is empty; write each as `some-key: some-tenant`")
    if not key.startswith(DIGEST_PREFIX):
        return DIGEST_PREFIX + hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
    if not _DIGEST.fullmatch(key.lower()):
        raise ValueError("a digest must be `sha256:` and 64 hex digits; make it with `printf %s KEY | sha256sum`")
    return key.lower()


def with_all_keys(args: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`args:` with the keys of the environment among those of `http.api_keys`.

    What is no mapping stays as it is: the settings' own checks name it. Raises SettingsError for an environment that
    holds no mapping, and for a key that stands for two tenants.
    """
    if not environment.get(KEYS_VARIABLE):
        return dict(args)
    http = args.get("http")
    if http is not None and not isinstance(http, Mapping):
        return dict(args)
    http = dict(http or {})
    own = http.get("api_keys") or {}
    if not isinstance(own, Mapping):
        return dict(args)
    more = _parse(environment[KEYS_VARIABLE])
    http["api_keys"] = {**own, **more}
    _refuse_contradictions({"http.api_keys": own, KEYS_VARIABLE: more})
    return {**args, "http": http}


def _parse(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:  # its message shows the line, which may hold a key
        found = None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise SettingsError(
            f'{KEYS_VARIABLE}: it must hold a mapping in YAML or JSON, such as {{"some-key": "some-tenant"}}; a key '
            f"that looks like a number needs quotes."
        )
    return found


def _refuse_contradictions(sources: Mapping[str, Mapping[str, Any]]) -> None:
    known: dict[str, tuple[str, tuple[Any, bool, Any]]] = {}
    for source, keys in sources.items():
        for key, whom in keys.items():
            try:
                digest = key_digest(key)
            except ValueError as error:
                raise SettingsError(f"{source}: {error}.") from None
            before, said = known.setdefault(digest, (source, _speaks_for(whom)))
            if said != _speaks_for(whom):
                raise SettingsError(
                    f"{source}: a key means something else here than in {before}; leave it in one of them."
                )


def _speaks_for(whom: Any) -> tuple[Any, bool, Any]:
    """Tenant, whether an administrator, and priority, of either form; what is neither is named by the settings' own
    checks."""
    if not isinstance(whom, Mapping):
        return whom, False, 0
    return whom.get("tenant"), bool(whom.get("admin")), whom.get("priority", 0)
