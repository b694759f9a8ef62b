"""Chooses the codec to store a segment with, and the one that a stored segment needs: made once, with its profile.

Segments that are not tolerant are coded without loss, so that one loss is never taken for another, and so are latents
(MLA). Other tolerant ones may be coded with loss, by a profile of the model where there is one, else by a generic one
made of their shape; whichever it was, the header names it and Redis keeps it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kernels.dtypes import DTYPES
from kvmanager.segments.format import RAW, MismatchReason, SegmentHeader, SegmentMismatch
from kvmanager.segments.keys import TOLERANT
from kvmanager.segments.sizes import BYTES

if TYPE_CHECKING:
    from kernels.codecs import Codec

logger = logging.getLogger(__name__)

LOSSLESS = "lossless"
CACHEGEN = "cachegen"
MOST_CODECS = 32
"""Kept at a time: one per codec, level and profile that is in use."""


class FormLevel(NamedTuple):
    """A form in which segments may be stored that is not dense (`deployments.segment_store.stored_form`)."""

    name: str
    """Of its codec in a header."""
    level: str


@dataclass(frozen=True, slots=True)
class Coding:
    """How segments are stored in Redis: the codecs of exact and of tolerant ones.

    `level` is CacheGen's; `profile` the digest of the model's own, b"" for none. `form`: of tolerant ones
    that have a tail; None: dense. `model`: a folder or a name, for what was measured of it.
    """

    exact: str
    tolerant: str
    level: int = 0
    profile: bytes = b""
    form: FormLevel | None = None
    model: str = ""

    @property
    def codecs(self) -> tuple[str, ...]:
        """With which segments are written; each once."""
        form = () if self.form is None else (self.form.name,)
        return tuple(dict.fromkeys((self.exact, self.tolerant, *form)))


RAW_CODING = Coding(RAW, RAW)


class Profiles(Protocol):
    """See `deployments.segment_store.redis_profiles`."""

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a profile, not verified."""
        ...

    def keep(self, digest: bytes, content: bytes) -> None:
        """See to it that it outlives what is written from now on."""
        ...


@dataclass(frozen=True, slots=True)
class WriteCodec:
    """A codec to write with, and the bytes of its profile, b"" without one."""

    codec: Codec
    profile: bytes = b""


class SegmentCodecs:
    """See the module's docstring. `kit` has `make_codec` and `CodecProfile`; None: `kernels.codecs`. Any thread."""

    def __init__(self, coding: Coding, profiles: Profiles, kit: Any = None) -> None:
        self._coding = coding
        self._profiles = profiles
        self._kit = kit
        self._made: dict[tuple[str, int, bytes], Codec] = {}
        self._generic: dict[tuple[int, ...], Any] = {}
        self._own_profile: Any = None
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Import and compile what segments need, so that no request waits for it; seconds, the first time.

        What tolerant ones need is done in the background: few servers have any.
        """
        self._try_out(self._coding.exact, 0)
        level = self._coding.level if self._coding.tolerant == CACHEGEN else 0
        threading.Thread(target=self._try_out, args=(self._coding.tolerant, level), daemon=True).start()

    def _try_out(self, name: str, level: int) -> None:
        if name == RAW:
            return
        from kernels.compiling import one_compiles  # numba, as below

        profile = self._from_kit().CodecProfile.generic((1, 1, 8)) if name == CACHEGEN else None
        codec = self._from_kit().make_codec(name, level, profile)
        with one_compiles("codecs"):
            for dtype in ("bfloat16", "float32"):  # by the bytes of a value
                values = np.zeros((2, 32, 1, 8), DTYPES[dtype])
                codec.decode(0, codec.encode(0, values), values)

    def for_writing(self, header: SegmentHeader) -> WriteCodec | None:
        """The codec for a raw segment; None: it stays raw. Raises StoreUnavailableError for a profile."""
        if header.fidelity != TOLERANT or header.is_latent:
            name, level = self._coding.exact, 0
        else:
            name, level = self._coding.tolerant, self._coding.level if self._coding.tolerant == CACHEGEN else 0
        if name == RAW or header.dtype == BYTES:
            return None
        if name != CACHEGEN:
            return WriteCodec(self._made_of(name, level, None))
        profile = self._profile_for(header)
        return WriteCodec(self._made_of(name, level, profile), profile.to_bytes())

    def for_reading(self, header: SegmentHeader) -> Codec:
        """The codec of a stored segment that is not raw.

        Raises SegmentMismatch when there is none such, or its profile is not to be had; StoreUnavailableError.
        """
        with self._lock:
            found = self._made.get((header.codec, header.level, header.profile))
        if found is not None:
            return found
        profile = self._fetched(header.profile) if header.profile else None
        try:
            return self._made_of(header.codec, header.level, profile)
        except ValueError:
            raise SegmentMismatch(MismatchReason.CODEC) from None

    def say_once(self, what: str) -> None:
        """Log a warning the first time."""
        with self._lock:
            first = what not in self._said
            self._said.add(what)
        if first:
            logger.warning("%s (logged once)", what)

    def _made_of(self, name: str, level: int, profile: Any) -> Codec:
        key = (name, level, profile.digest if profile is not None else b"")
        with self._lock:
            found = self._made.get(key)
        if found is None:
            found = self._from_kit().make_codec(name, level, profile)
            with self._lock:
                if len(self._made) >= MOST_CODECS:
                    self._made.clear()
                self._made[key] = found
        return found

    def _profile_for(self, header: SegmentHeader) -> Any:
        """The model's profile, or a generic one of the segment's shape."""
        if self._own_profile is None and self._coding.profile:
            try:
                self._own_profile = self._fetched(self._coding.profile)
            except SegmentMismatch:
                self.say_once("the model's codec profile is not in Redis")
        layers, _, _, heads, dim = header.shape
        if self._own_profile is not None and self._own_profile.shape == (layers, heads, dim):
            return self._own_profile
        self.say_once("tolerant KV is coded with a generic profile: `make profile-codec` makes the model's own")
        if (layers, heads, dim) not in self._generic:
            self._generic[layers, heads, dim] = self._from_kit().CodecProfile.generic((layers, heads, dim))
        return self._generic[layers, heads, dim]

    def _fetched(self, digest: bytes) -> Any:
        content = self._profiles.get(digest)
        try:
            profile = self._from_kit().CodecProfile.from_bytes(content) if content else None
        except ValueError:
            profile = None
        if profile is None or profile.digest != digest:
            raise SegmentMismatch(MismatchReason.PROFILE)
        return profile

    def _from_kit(self) -> Any:
        if self._kit is None:
            import kernels.codecs  # numba: not for a worker that stores raw segments only

            self._kit = kernels.codecs
        return self._kit
