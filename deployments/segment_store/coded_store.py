"""Segments are coded in Redis and raw everywhere else: the layer of the store that codes and decodes them.

* Each layer of a segment is a section by itself (`kvmanager.segments.format`), coded by itself.
* Exactness is checked to the end: a lossless section begins with the checksum of the raw layer, and what comes out of
  the decoder is compared with it. It costs nothing, for the raw segment needs that checksum anyway.
* Nothing is encoded that was not verified: a damaged layer would get a checksum that is right.
* A segment is never larger in Redis than raw: what a codec cannot make smaller, or does not take, is stored raw.
* Decoding allocates the segment's raw size, as its verified header states it, and nothing else.

Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.segment_codecs import LOSSLESS, Profiles, SegmentCodecs, WriteCodec
from deployments.segment_store.segment_tail import split_tail
from deployments.segment_store.stored_form import StoredForm
from kernels.dtypes import DTYPES, Array
from kvmanager.segments.format import (
    CHECKSUM_BYTES,
    RAW,
    Buffer,
    MismatchReason,
    SegmentHeader,
    SegmentLayers,
    SegmentMismatch,
    SegmentSealer,
    coded_body_offset,
    payload_bytes,
    read_header,
    read_layers,
    seal,
)
from kvmanager.segments.forms import DENSE, stated_form
from kvmanager.segments.sizes import MOST_SEGMENT_BYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CodedStore:
    """See the module's docstring. Outside: raw segments of one model; inside: what `store` holds."""

    def __init__(
        self,
        store: CheckedStore,
        fingerprint: bytes,
        codecs: SegmentCodecs,
        profiles: Profiles,
        meter: CodecMeter,
        form: StoredForm | None = None,
    ) -> None:
        """`form`: of segments that come with a tail; None: all are dense."""
        self._store = store
        self._fingerprint = fingerprint
        self._codecs = codecs
        self._profiles = profiles
        self._meter = meter
        self._form = form

    def fetch(self, key: bytes) -> Buffer | None:
        """The verified segment as it is stored; see `CheckedStore.get`."""
        return self._store.get(key)

    def decode(self, key: bytes, stored: Buffer) -> Buffer | Bytes:
        """The raw segment of what `fetch` brought.

        Raises SegmentMismatch for a codec or profile that is not known, and for what no codec can have written;
        StoreUnavailableError when the profile cannot be asked for.
        """
        layers = read_layers(stored, key=key, fingerprint=self._fingerprint)
        header = layers.header
        if header.codec == RAW:
            return stored
        if header.raw_sealed_bytes > MOST_SEGMENT_BYTES:
            raise SegmentMismatch(MismatchReason.SHAPE)
        codec = self._codecs.for_reading(header)
        began = time.monotonic()
        raw = np.empty(header.raw_sealed_bytes, np.uint8)
        sealer = SegmentSealer(raw.data, header.decoded)
        for number, values in enumerate(_arrays(raw, header)):
            section = layers.layer(number)
            expected, coded = _split(section, header.codec)
            try:
                codec.decode(number, coded, values)
            except ValueError:  # `kernels.errors.CodecError`, and a profile of another shape
                raise SegmentMismatch(MismatchReason.CODEC) from None
            if sealer.add() != expected and expected:
                raise SegmentMismatch(MismatchReason.CODEC)
        sealer.finish()
        self._meter.decoded(header.codec, time.monotonic() - began)
        return raw

    def get(self, key: bytes) -> Buffer | Bytes | None:
        """The raw segment; None when there is none. Raises as `fetch` and `decode`."""
        stored = self.fetch(key)
        return None if stored is None else self.decode(key, stored)

    def put_by_tail(self, key: bytes, buffer: Any) -> tuple[int, bytes]:
        """Store a raw segment that may have a tail behind it, in the form that the tail is for; else as `put`.

        Returns the bytes that it takes and its form (`kvmanager.segments.forms`). Raises as `put`.
        """
        sealed, tail = split_tail(buffer)
        formed = None
        if tail is not None and self._form is not None:
            began = time.monotonic()
            formed = self._form.stored(key, sealed, tail)
        if formed is None:
            return self.put(key, sealed), DENSE
        self._meter.encoded(read_header(formed.data).codec, len(sealed), len(formed), time.monotonic() - began)
        self._store.put(key, formed.data)
        return len(formed), stated_form(formed.data)

    def put(self, key: bytes, sealed: Any) -> int:
        """Store a raw segment, coded; return the bytes that it takes, never more than raw.

        Raises SegmentMismatch for what is not the segment, StoreFullError, StoreUnavailableError.
        """
        layers = read_layers(sealed, key=key, fingerprint=self._fingerprint)
        writer = self._codecs.for_writing(layers.header)
        coded = None if writer is None else self._encoded(layers, writer)
        if writer is not None and coded is not None and writer.profile:
            self._profiles.keep(writer.codec.profile, writer.profile)
        if writer is None:  # counted too: bytes by codec must add up to what is stored
            self._meter.encoded(RAW, layers.header.sealed_bytes, layers.header.sealed_bytes, 0.0)
        stored = memoryview(sealed).cast("B") if coded is None else coded.data
        self._store.put(key, stored)
        return len(stored)

    def _encoded(self, layers: SegmentLayers, writer: WriteCodec) -> Bytes | None:
        """The coded segment; None when that is no smaller than the raw one."""
        raw_header, codec = layers.header, writer.codec
        began = time.monotonic()
        try:
            parts = [
                (layers.checksum(number) if codec.name == LOSSLESS else b"", codec.encode(number, values))
                for number, values in enumerate(_verified_arrays(layers))
            ]
        except ValueError as error:  # a profile of another shape, a layout that it does not take
            self._codecs.say_once(f"segments are stored raw, for {codec.name} does not take them: {error}")
            return None
        lengths = [len(digest) + coded.nbytes for digest, coded in parts]
        start = coded_body_offset(len(parts), raw_header.num_blocks)
        smaller = sum(lengths) < payload_bytes(raw_header.shape, raw_header.dtype)
        nbytes = start + sum(lengths) if smaller else raw_header.sealed_bytes
        self._meter.encoded(codec.name, raw_header.sealed_bytes, nbytes, time.monotonic() - began)
        if not smaller:
            return None
        buffer = np.empty(nbytes, np.uint8)
        for (digest, coded), length in zip(parts, lengths, strict=True):
            buffer[start : start + len(digest)] = np.frombuffer(digest, np.uint8)
            buffer[start + len(digest) : start + length] = coded
            start += length
        header = replace(
            raw_header,
            codec=codec.name,
            level=codec.level,
            profile=codec.profile,
            body_bytes=nbytes - raw_header.head_bytes,
        )
        seal(buffer.data, header, lengths)
        return buffer


def _split(section: memoryview, codec: str) -> tuple[bytes, memoryview]:
    """The checksum of the raw layer, b"" for a codec with loss, and what is coded."""
    if codec != LOSSLESS:
        return b"", section
    return bytes(section[:CHECKSUM_BYTES]), section[CHECKSUM_BYTES:]


def _verified_arrays(layers: SegmentLayers) -> Iterator[Array]:
    """Each layer of a raw segment as an array, verified when its turn comes."""
    for number in range(len(layers)):
        yield _array(np.frombuffer(layers.layer(number), np.uint8), layers.header)


def _arrays(raw: Bytes, header: SegmentHeader) -> list[Array]:
    """Where each layer of a raw segment is to be written."""
    sections = np.split(raw[header.decoded.body_offset :], header.shape[0])
    return [_array(section, header) for section in sections]


def _array(part: Bytes, header: SegmentHeader) -> Array:
    return part.view(DTYPES[header.dtype]).reshape(header.shape[1:])
