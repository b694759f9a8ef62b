"""Protection of KV in Redis against writers that do not know the server's secret.

A segment is *guarded* when it goes to Redis and *opened*, before anything else looks at it, when it comes back. In
memory and in the CPU tier it is as `kvmanager.segments.head` says. A guarded header differs in four fields::

    offset  bytes  field
        47      1  protection: 1 = keyed checksum, 2 = encrypted too; 0 for a segment that is not guarded
       192     16  salt, drawn for each write
       208     16  tag of the body: AES-256-GCM over bytes 0..207 of the header and all that follows the head
       224     16  keyed BLAKE2b over bytes 0..223 and the hashes of the blocks

* The head is checked by itself, so that the index can be read from heads alone, and it names the body's tag. So
  neither a field, nor a part of another segment, nor a part of an earlier write of this one fits in.
* The header names the segment's key: under another key it is refused by the reader of that key. What the same
  segment was at an earlier time is the same KV: a replay of all of it does no harm.
* Protection 1 authenticates the body (GMAC); 2 encrypts it as well. The head stays readable: block hashes, parent,
  shape, tag of the tenant.
* Each write has an AES key of its own, derived from salt and segment key, and encrypts one message with it: the nonce
  may be constant. Two writes share a key only if their salts are equal: a chance of 2**-33 after 2**48 writes of *one*
  segment. A message stays far below GCM's 64 GiB.

Why GMAC: docs/measured/overhead.md, "Redis". Pure: the salt is passed in. Any thread.
"""

import hashlib
import hmac
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from kvmanager.segments.head import (
    GUARD_BYTES,
    GUARD_OFFSET,
    KEY_OFFSET,
    PROTECTION_OFFSET,
    Buffer,
    bytes_of,
    reseal_header,
    stated_body_bytes,
    stated_head_bytes,
)
from kvmanager.segments.keys import HASH_BYTES
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.sizes import HEADER_BYTES

SALT_BYTES: Final = 16
_TAG_BYTES = 16
_BODY_TAG = GUARD_OFFSET + SALT_BYTES
_HEADER_TAG = _BODY_TAG + _TAG_BYTES
assert _HEADER_TAG + _TAG_BYTES == GUARD_OFFSET + GUARD_BYTES

_KEYED, _ENCRYPTED = 1, 2
_PURPOSES = {_KEYED: b"redis-body-gmac", _ENCRYPTED: b"redis-body-gcm"}
_NONCE = bytes(12)
_BLOCK_BYTES = 16
"""Room in bytes that `update_into` needs beyond what it writes."""


class SegmentGuard:
    """Guards and opens segments under one secret. `encrypts`: what is guarded from now on; both are opened."""

    def __init__(self, secret: ServerSecret, *, encrypts: bool = False) -> None:
        self._header_key = secret.key_for(b"redis-header")
        self._body_keys = {protection: secret.key_for(purpose) for protection, purpose in _PURPOSES.items()}
        self._protection = _ENCRYPTED if encrypts else _KEYED

    def guard(self, head: Buffer, body: Buffer, salt: bytes) -> tuple[bytearray, Buffer]:
        """Return head and body as they go to Redis; the body itself where it is not encrypted, else a new one.

        ``head`` is a verified one, header and block hashes. ``salt``: `SALT_BYTES`, unpredictable and never repeated.
        """
        if len(salt) != SALT_BYTES:
            raise ValueError(f"a salt is {SALT_BYTES} bytes, got {len(salt)}")
        guarded = bytearray(head)
        guarded[PROTECTION_OFFSET] = self._protection
        guarded[GUARD_OFFSET:_BODY_TAG] = salt
        encryptor = self._cipher(guarded, modes.GCM(_NONCE)).encryptor()
        encryptor.authenticate_additional_data(guarded[:_BODY_TAG])
        if self._protection == _ENCRYPTED:
            body = _crypted(encryptor, body)
        else:
            encryptor.authenticate_additional_data(body)
        encryptor.finalize()
        guarded[_BODY_TAG:_HEADER_TAG] = encryptor.tag
        guarded[_HEADER_TAG : GUARD_OFFSET + GUARD_BYTES] = self._header_tag(guarded)
        reseal_header(guarded)
        return guarded, body

    def open_header(self, head: Buffer) -> bytearray:
        """Return the head as it was before it was guarded. Says nothing of the body.

        Raises SegmentMismatch, and nothing else, whatever the bytes are.
        """
        view = bytes_of(head)
        opened = bytearray(view[: stated_head_bytes(view)])
        stated = bytes(opened[_HEADER_TAG : GUARD_OFFSET + GUARD_BYTES])
        if opened[PROTECTION_OFFSET] not in _PURPOSES or not hmac.compare_digest(stated, self._header_tag(opened)):
            raise SegmentMismatch(MismatchReason.KEYED)
        opened[PROTECTION_OFFSET] = 0
        opened[GUARD_OFFSET : GUARD_OFFSET + GUARD_BYTES] = bytes(GUARD_BYTES)
        reseal_header(opened)
        return opened

    def open(self, guarded: bytearray | memoryview) -> bytearray | memoryview:
        """Return the segment as it was before it was guarded: ``guarded`` itself, changed, or a new buffer.

        Raises SegmentMismatch, and nothing else, whatever the bytes are. ``guarded`` is of no use then.
        """
        head = self.open_header(guarded)
        view = memoryview(guarded)
        body = view[len(head) :]
        stated_bytes = stated_body_bytes(view)
        if len(body) != stated_bytes:
            short = stated_bytes is None or len(body) < stated_bytes
            raise SegmentMismatch(MismatchReason.TRUNCATED if short else MismatchReason.LENGTH)
        tag = bytes(view[_BODY_TAG:_HEADER_TAG])
        decryptor = self._cipher(guarded, modes.GCM(_NONCE, tag)).decryptor()
        decryptor.authenticate_additional_data(view[:_BODY_TAG])
        opened = guarded
        if guarded[PROTECTION_OFFSET] == _ENCRYPTED:
            opened = _crypted(decryptor, body, room_before=len(head))
        else:
            decryptor.authenticate_additional_data(body)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise SegmentMismatch(MismatchReason.KEYED) from None
        memoryview(opened)[: len(head)] = head
        return opened

    def _cipher(self, guarded: bytearray | memoryview, mode: modes.GCM) -> Cipher[modes.GCM]:
        """The cipher of one write: its key is HKDF-Expand (RFC 5869) of the secret's, by salt and segment key."""
        of = bytes(guarded[GUARD_OFFSET:_BODY_TAG]) + bytes(guarded[KEY_OFFSET : KEY_OFFSET + HASH_BYTES])
        key = hmac.digest(self._body_keys[guarded[PROTECTION_OFFSET]], of + b"\x01", hashlib.sha256)
        return Cipher(algorithms.AES256(key), mode)

    def _header_tag(self, head: bytearray) -> bytes:
        digest = hashlib.blake2b(head[:_HEADER_TAG], key=self._header_key, digest_size=_TAG_BYTES)
        digest.update(head[HEADER_BYTES:])
        return digest.digest()


class ContentTag:
    """Keyed tags of named content in Redis other than segments. The content follows its tag."""

    def __init__(self, secret: ServerSecret) -> None:
        self._key = secret.key_for(b"redis-content")

    def tagged(self, name: bytes, content: bytes) -> bytes:
        """Return what goes to Redis."""
        return self._tag(name, content) + content

    def content(self, name: bytes, tagged: bytes) -> bytes | None:
        """Return what was tagged under ``name``; None for anything else."""
        tag, content = tagged[:_TAG_BYTES], tagged[_TAG_BYTES:]
        return content if hmac.compare_digest(tag, self._tag(name, content)) else None

    def _tag(self, name: bytes, content: bytes) -> bytes:
        digest = hashlib.blake2b(len(name).to_bytes(8, "little") + name, key=self._key, digest_size=_TAG_BYTES)
        digest.update(content)
        return digest.digest()


def _crypted(context: CipherContext, content: Buffer, room_before: int = 0) -> memoryview:
    """Return a new buffer with what the cipher makes of ``content``, after some room."""
    nbytes = memoryview(content).nbytes
    made = memoryview(bytearray(room_before + nbytes + _BLOCK_BYTES))
    context.update_into(content, made[room_before:])
    return made[: room_before + nbytes]
