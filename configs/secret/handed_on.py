"""What other processes are told of the settings: digests of keys, and the name of a file for the other secrets.

Ray Serve writes the arguments of an application into its log, in full. So `make serve` hands it none that may hold a
secret: keys become digests, and whatever else is marked as secret (`repr=False`) goes into a file that `secrets_file`
names. Under `serve run` people write that file themselves.

No message here shows what such a file holds.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from configs.errors import SettingsError
from configs.kv_section import EMBEDDED_REDIS, EXTERNAL_REDIS
from configs.model_folder import PROJECT_ROOT
from configs.presets import below
from configs.secret.api_keys import DIGEST_PREFIX, ApiKey, key_digest, with_all_keys

_KEYS = ("api_keys", "metrics_key")
"""Secrets whose digests take their place."""
_NO_SECRETS: tuple[Any, ...] = (None, EMBEDDED_REDIS, {})


def with_secrets_file(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args:` with the settings of the file that `secrets_file` names, which win.

    A name that is no path stays: the settings' own check names it. Raises SettingsError for a file that cannot be
    read, that holds no settings, or that others on this machine can read.
    """
    path = args.get("secrets_file")
    if not isinstance(path, str) or not path:
        return dict(args)
    file = PROJECT_ROOT / Path(path).expanduser()
    try:
        text, exposed = file.read_text(encoding="utf-8"), bool(file.stat().st_mode & stat.S_IROTH)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SettingsError(f"secrets_file: {path} cannot be read ({reason}); give the path of a file.") from None
    if exposed:
        raise SettingsError(
            f"secrets_file: everybody on this machine can read the secrets in {path}; run `chmod 600 {path}`."
        )
    try:
        held = yaml.safe_load(text)
    except yaml.YAMLError:  # its message shows the line, which may hold a secret
        held = None
    if not isinstance(held, Mapping) or "secrets_file" in held:
        raise SettingsError(
            f"secrets_file: {path} must hold settings in YAML, as below `args:`, such as "
            f'{{"kv": {{"redis_url": "redis://…"}}}}.'
        )
    return below(held, args)


def with_secrets(args: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`args:` with all that stands elsewhere: in `secrets_file`, and keys. Raises SettingsError."""
    return with_all_keys(with_secrets_file(args), environment)


def parted(args: Mapping[str, Any], secret: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`args:` in two fragments: what may be shown, and what is `secret` (of `secret_fields`) but no key."""
    shown, hidden = dict(args), {}
    for name, inside in secret.items():
        given = shown.get(name)
        if name in _KEYS or given in _NO_SECRETS:
            continue
        if inside is True:
            hidden[name] = shown.pop(name)
        elif isinstance(given, Mapping):
            shown[name], within = parted(given, inside)
            hidden |= {name: within} if within else {}
    return shown, hidden


def sealed(args: Mapping[str, Any], keys: Mapping[str, str | ApiKey], metrics_key: str | None) -> dict[str, Any]:
    """`args:` for other processes, with the digests of all `keys` in place of the keys and of where they came from.

    Any user of the cluster can read the arguments of actors. Only the Redis tier is told where an external Redis is.
    """
    passed = {name: value for name, value in args.items() if name != "secrets_file"}
    http = dict(args.get("http") or {})
    http["api_keys"] = {
        key_digest(key): whom if isinstance(whom, str) else whom.model_dump() for key, whom in keys.items()
    }
    if metrics_key is not None:
        http["metrics_key"] = key_digest(metrics_key)
    kv = dict(args.get("kv") or {})
    if kv.get("redis_url") not in _NO_SECRETS:
        kv["redis_url"] = EXTERNAL_REDIS
    return {**passed, "http": http, "kv": kv}


def shown_secrets(args: Mapping[str, Any]) -> list[str]:
    """Names of the settings that hold a secret in `args:` itself, of checked ones: Serve has logged them."""
    http, kv, engine = (args.get(section) or {} for section in ("http", "kv", "engine"))
    held = {
        "http.api_keys": any(not key.startswith(DIGEST_PREFIX) for key in http.get("api_keys") or {}),
        "http.metrics_key": not (http.get("metrics_key") or DIGEST_PREFIX).startswith(DIGEST_PREFIX),
        "http.otlp_endpoint": _may_hold_password(http.get("otlp_endpoint")),
        "kv.redis_url": _may_hold_password(kv.get("redis_url")),
        "engine.extra_args": bool((engine.get("extra_args") or {}).get("hf_token")),
    }
    return [name for name, is_held in held.items() if is_held]


def _may_hold_password(url: str | None) -> bool:
    return url is not None and ("@" in url or "?" in url)
