"""Nobody without the secret can make, change, mix or rename what lies in Redis; what was guarded opens unchanged."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.segments.format import (
    HEADER_BYTES,
    MismatchReason,
    SegmentHeader,
    SegmentMismatch,
    head_bytes,
    read_header,
    seal,
    verify,
)
from kvmanager.segments.guard import SALT_BYTES, ContentTag, SegmentGuard
from kvmanager.segments.head import GUARD_BYTES, GUARD_OFFSET, PROTECTION_OFFSET, reseal_header
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.spans import NodeKind, SegmentSpan

SECRET, ANOTHER = ServerSecret(b"s" * 32), ServerSecret(b"a" * 32)
FINGERPRINT = b"F" * 32
SALT, OTHER_SALT = b"sixteen bytes of", b"another sixteen "


def sealed(key: int = 1, content: int = 0) -> bytes:
    hashes = b"9" * 32 + bytes([key]) * 32
    span = SegmentSpan(SegmentKey(hashes[32:]), None, 0, 2, NodeKind.REQUEST, hashes[:8] + hashes[32:40])
    header = SegmentHeader.raw(span, hashes, FINGERPRINT, (2, 2, 16, 1, 8), "float16")
    buffer = bytearray(bytes([content]) * header.sealed_bytes)
    seal(buffer, header)
    return bytes(buffer)


WHOLE = sealed()
HEAD = head_bytes(2)


def guarded(whole: bytes = WHOLE, secret: ServerSecret = SECRET, encrypts: bool = False, salt: bytes = SALT) -> bytes:
    guard = SegmentGuard(secret, encrypts=encrypts)
    return b"".join(guard.guard(whole[:HEAD], whole[HEAD:], salt))


def opened(stored: bytes, secret: ServerSecret = SECRET) -> bytes:
    return bytes(SegmentGuard(secret).open(bytearray(stored)))


def reason(stored: bytes, secret: ServerSecret = SECRET) -> MismatchReason:
    with pytest.raises(SegmentMismatch) as refused:
        opened(stored, secret)
    return refused.value.reason


@pytest.mark.parametrize("encrypts", [False, True])
def test_what_was_guarded_opens_to_the_same_bytes_whatever_the_opener_encrypts(encrypts: bool) -> None:
    stored = guarded(encrypts=encrypts)
    assert len(stored) == len(WHOLE)
    assert opened(stored) == WHOLE
    assert bytes(SegmentGuard(SECRET, encrypts=True).open(bytearray(stored))) == WHOLE
    header = SegmentGuard(SECRET).open_header(stored[:HEAD])
    assert bytes(header) == WHOLE[:HEAD]
    verify(opened(stored), key=b"\1" * 32, fingerprint=FINGERPRINT)


def test_a_keyed_checksum_leaves_the_body_as_it_is_and_encryption_shows_none_of_it() -> None:
    assert guarded()[HEAD:] == WHOLE[HEAD:]
    hidden = guarded(encrypts=True)[HEAD:]
    assert sum(left == right for left, right in zip(hidden, WHOLE[HEAD:], strict=True)) < len(hidden) / 20


def test_each_write_has_a_key_stream_of_its_own() -> None:
    bodies = {
        guarded(encrypts=True)[HEAD:],
        guarded(encrypts=True, salt=OTHER_SALT)[HEAD:],
        guarded(sealed(key=2), encrypts=True)[HEAD:],
        guarded(secret=ANOTHER, encrypts=True)[HEAD:],
    }
    assert len(bodies) == 4


@pytest.mark.parametrize("encrypts", [False, True])
@given(st.data())
def test_every_flipped_bit_is_refused_though_all_unkeyed_checksums_are_made_anew(
    encrypts: bool, data: st.DataObject
) -> None:
    forged = bytearray(guarded(encrypts=encrypts))
    bit = data.draw(st.integers(0, 8 * len(forged) - 1))
    forged[bit // 8] ^= 1 << bit % 8
    reseal_header(forged)
    if bit // 8 in range(HEADER_BYTES - 16, HEADER_BYTES):
        return  # the checksum was mended
    reason(bytes(forged))


def test_a_segment_that_was_made_without_the_secret_is_refused() -> None:
    assert reason(WHOLE) is MismatchReason.KEYED
    assert reason(guarded(secret=ANOTHER)) is MismatchReason.KEYED
    assert reason(guarded(secret=ANOTHER, encrypts=True)) is MismatchReason.KEYED


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_header_with_the_body_of_another_or_an_earlier_write_is_refused(encrypts: bool) -> None:
    mine = guarded(encrypts=encrypts)
    others = [
        guarded(sealed(key=2, content=3), encrypts=encrypts),
        guarded(sealed(content=7), encrypts=encrypts),
        guarded(sealed(content=7), encrypts=encrypts, salt=OTHER_SALT),
    ]
    for other in others:
        assert reason(mine[:HEAD] + other[HEAD:]) is MismatchReason.KEYED
        assert reason(other[:HEAD] + mine[HEAD:]) is MismatchReason.KEYED
        mixed = bytearray(mine)  # the guard of one write on the header of another
        mixed[GUARD_OFFSET : GUARD_OFFSET + GUARD_BYTES] = other[GUARD_OFFSET : GUARD_OFFSET + GUARD_BYTES]
        reason(bytes(mixed[:HEAD]) + other[HEAD:])


def test_another_segments_value_under_a_key_is_not_that_keys() -> None:
    with pytest.raises(SegmentMismatch) as refused:
        verify(opened(guarded(sealed(key=2))), key=b"\1" * 32, fingerprint=FINGERPRINT)
    assert refused.value.reason is MismatchReason.KEY


@pytest.mark.parametrize("encrypts", [False, True])
def test_neither_kind_of_protection_passes_for_the_other(encrypts: bool) -> None:
    forged = bytearray(guarded(encrypts=encrypts))
    forged[PROTECTION_OFFSET] ^= 3
    assert reason(bytes(forged)) is MismatchReason.KEYED


def test_a_body_that_is_too_short_or_too_long_is_named_so() -> None:
    assert reason(guarded()[:-1]) is MismatchReason.TRUNCATED
    assert reason(guarded() + b"\0") is MismatchReason.LENGTH
    assert reason(guarded()[:HEAD]) is MismatchReason.TRUNCATED
    assert reason(guarded()[:100]) is MismatchReason.TRUNCATED


def test_an_older_format_is_named_so() -> None:
    older = bytearray(guarded())
    older[8] = 4
    assert reason(bytes(older)) is MismatchReason.VERSION


def test_a_guarded_header_is_no_header_for_those_who_do_not_open_it() -> None:
    with pytest.raises(SegmentMismatch):
        read_header(guarded())


@given(st.binary(max_size=600))
def test_any_bytes_are_refused_and_nothing_else_is_raised(rubbish: bytes) -> None:
    reason(rubbish)
    reason(WHOLE[:10] + rubbish)


def test_a_salt_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{SALT_BYTES} bytes"):
        guarded(salt=b"short")


def test_content_beside_segments_is_its_names_and_its_secrets_own() -> None:
    tags = ContentTag(SECRET)
    tagged = tags.tagged(b"name", b"content")
    assert tags.content(b"name", tagged) == b"content"
    assert tags.content(b"names", tagged) is None
    assert tags.content(b"name", tagged[:-1]) is None
    assert tags.content(b"name", b"") is None
    assert ContentTag(ANOTHER).content(b"name", tagged) is None
