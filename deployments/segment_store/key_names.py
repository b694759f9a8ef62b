"""Names of crosskv's keys in Redis. A store that only reads and writes segments is given their prefix."""

from __future__ import annotations

import re

from configs.kv_section import REDIS_NAMESPACE

KEY_ROOT = b"crosskv:1:"
"""Of everything that crosskv keeps in a Redis; 1 is the version of this naming."""


def namespace_root(namespace: str) -> bytes:
    """What all keys of a deployment begin with. Raises ValueError for a namespace that cannot be part of a key."""
    if not re.fullmatch(REDIS_NAMESPACE, namespace):
        raise ValueError(
            f"kv.redis_namespace {namespace!r} cannot be part of a key: use 1 to 64 letters, digits, '_', '.' or '-'"
        )
    return KEY_ROOT + namespace.encode() + b":"


def segment_prefix(namespace: str, fingerprint: bytes) -> bytes:
    """What the names of one model's segments begin with. Raises ValueError as `namespace_root`."""
    return namespace_root(namespace) + _model(fingerprint) + b":"


def owner_key(namespace: str, fingerprint: bytes) -> bytes:
    """The key of the claim on those segments; it does not begin as they do. Raises ValueError as `namespace_root`."""
    return namespace_root(namespace) + b"owner:" + _model(fingerprint)


def _model(fingerprint: bytes) -> bytes:
    return fingerprint.hex()[:16].encode()  # short for people; the header holds the whole
