"""Codec profiles on disk: one file per model, which the Redis tier brings into Redis at its start.

A profile belongs to weights. It says whose by `model_digest`, which is made of the ends of the weight files and not of
all their bytes: a profile of other weights loses more in tolerant KV, and exact KV knows no profiles.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

from deployments.segment_store.redis_profiles import MOST_PROFILE_BYTES

logger = logging.getLogger(__name__)

SUFFIX = ".profile"
SHIPPED = "kv_profile.dat"
"""In a model's own folder. Not `.bin`, which counts as weights."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
_END_BYTES = 1 << 20


class FoundProfile(NamedTuple):
    """A profile's digest, and its bytes."""

    digest: bytes
    content: bytes


def profile_path(folder: str, model: str) -> Path:
    """Where `make profile-codec` puts the profile of a model: a local folder or a name. May read the model's files."""
    return Path(folder) / (model_digest(model).hex() + SUFFIX)


def model_digest(model: str) -> bytes:
    """16 bytes that identify a model's weights: a folder's files, else the name. Raises OSError."""
    digest = hashlib.sha256(b"crosskv-codec-profile")
    files = sorted({file for pattern in _WEIGHT_FILES for file in Path(model).glob(pattern)})
    if not files:
        digest.update(model.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_END_BYTES))
            stream.seek(max(0, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    return digest.digest()[:16]


def find_profile(folder: str, model: str) -> FoundProfile | None:
    """The profile of a model, made here or shipped with it (`SHIPPED`); None for none.

    Blocks; a file that is not that model's is said and ignored.
    """
    try:
        made = profile_path(folder, model) if folder else None
    except OSError as error:
        logger.warning("%s cannot be read, so its codec profile is not looked for: %s", model, error)
        return None
    for path in (made, Path(model) / SHIPPED):
        if path is not None and (found := _read(path, model)) is not None:
            return found
    return None


def _read(path: Path, model: str) -> FoundProfile | None:
    try:
        if not path.exists():
            return None
        if path.stat().st_size > MOST_PROFILE_BYTES:
            raise ValueError("it is far too large")
        from kernels.codecs import CodecProfile  # numba and more: only where there is a profile to read

        content = path.read_bytes()
        profile = CodecProfile.from_bytes(content)
        if profile.model != model_digest(model):
            raise ValueError("it was made of other weights")
    except (OSError, ValueError) as error:
        logger.warning("%s is not the model's codec profile, and is not used: %s", path, error)
        return None
    return FoundProfile(profile.digest, content)
