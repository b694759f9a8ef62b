"""Faults in `kvmanager/segments`: names of KV, and the bytes that are stored under them."""

from __future__ import annotations

from mutant import Mutant

FORMAT = "kvmanager/segments/format.py"
HEAD = "kvmanager/segments/head.py"
HEADER = "kvmanager/segments/header.py"
GUARD = "kvmanager/segments/guard.py"
KEYS = "kvmanager/segments/keys.py"
TESTS = "tests/kvmanager/segments/"

MUTANTS = (
    Mutant(
        "coded-layer-not-compared",
        FORMAT,
        "if checksum(section) != digest:",
        "if not digest:",
        (TESTS + "test_segment_format.py",),
        "A flipped bit in a coded segment becomes a wrong answer.",
    ),
    Mutant(
        "ratio-not-in-the-name",
        KEYS,
        'manner = f"{fidelity} {variant}" if variant else fidelity',
        "manner = fidelity.upper() if variant else fidelity",
        (TESTS + "test_keys.py",),
        "A prompt that is to be computed whole reads what a lower ratio left of it, and answers wrong.",
    ),
    Mutant(
        "raw-blocks-not-compared",
        FORMAT,
        "if checksum(section[start:stop]) != stated[at : at + CHECKSUM_BYTES]:",
        "if not stated[at : at + CHECKSUM_BYTES]:",
        (TESTS + "test_segment_format.py",),
        "A flipped bit in the first blocks of a raw segment becomes a wrong answer.",
    ),
    Mutant(
        "table-not-compared",
        FORMAT,
        "if checksum(table) != stated_table_digest(view):",
        "if not stated_table_digest(view):",
        (TESTS + "test_segment_format.py",),
        "Layers of two segments can be put together, each with a checksum that is right.",
    ),
    Mutant(
        "longer-segment-taken",
        FORMAT,
        "if len(view) > header.sealed_bytes:",
        "if len(view) > 2 * header.sealed_bytes:",
        (TESTS + "test_segment_format.py",),
        "Bytes that no checksum covers pass for a part of a segment.",
    ),
    Mutant(
        "another-models-segment-taken",
        FORMAT,
        "(header.fingerprint == fingerprint, MismatchReason.FINGERPRINT),",
        "(len(header.fingerprint) == len(fingerprint), MismatchReason.FINGERPRINT),",
        (TESTS + "test_segment_format.py",),
        "KV of another model with the same shape is loaded, and every answer from it is noise.",
    ),
    Mutant(
        "head-not-compared",
        HEAD,
        "sound = view[_FIELDS.size : HEADER_BYTES] == _own_checksum(view) and block_hashes[-HASH_BYTES:] == key",
        "sound = block_hashes[-HASH_BYTES:] == key",
        (TESTS + "test_segment_header.py", TESTS + "test_segment_format.py"),
        "A damaged header puts a segment at another place of the prompt.",
    ),
    Mutant(
        "exact-segment-coded-with-loss",
        HEADER,
        "if lossy and self.fidelity != TOLERANT:",
        "if lossy and not self.fidelity:",
        (TESTS + "test_segment_header.py", TESTS + "test_segment_format.py"),
        "Prompts that must be exact are answered from KV that was stored with loss.",
    ),
    Mutant(
        "keyed-head-not-compared",
        GUARD,
        "if opened[PROTECTION_OFFSET] not in _PURPOSES or not hmac.compare_digest(stated, self._header_tag(opened)):",
        "if opened[PROTECTION_OFFSET] not in _PURPOSES or not stated:",
        (TESTS + "test_segment_guard.py",),
        "An attacker who can write Redis fills the index with segments that do not exist.",
    ),
    Mutant(
        "keyed-body-not-compared",
        GUARD,
        "            raise SegmentMismatch(MismatchReason.KEYED) from None\n",
        "            pass\n",
        (TESTS + "test_segment_guard.py",),
        "An attacker who can write Redis plants KV, and with it answers.",
    ),
    Mutant(
        "write-salt-left-out-of-its-key",
        GUARD,
        "of = bytes(guarded[GUARD_OFFSET:_BODY_TAG]) + bytes(",
        "of = bytes(SALT_BYTES) + bytes(",
        (TESTS + "test_segment_guard.py",),
        "Two writes of a segment share key and nonce: a reader of both sees where they differ.",
    ),
    Mutant(
        "keyed-content-not-compared",
        GUARD,
        "return content if hmac.compare_digest(tag, self._tag(name, content)) else None",
        "return content if len(tag) == _TAG_BYTES else None",
        (TESTS + "test_segment_guard.py",),
        "An attacker who can write Redis replaces a codec's profile, and with it all tolerant KV.",
    ),
    Mutant(
        "tenant-left-out-of-salt",
        KEYS,
        "parts = [fingerprint, tenant.encode(), manner.encode()]",
        "parts = [fingerprint, manner.encode()]",
        (TESTS + "test_keys.py",),
        "A tenant finds out which prompts another one has sent, by how fast they are answered.",
    ),
    Mutant(
        "fidelity-left-out-of-salt",
        KEYS,
        "parts = [fingerprint, tenant.encode(), manner.encode()]",
        "parts = [fingerprint, tenant.encode()]",
        (TESTS + "test_keys.py",),
        "An exact prompt is answered from tolerant KV.",
    ),
    Mutant(
        "parts-of-salt-run-together",
        KEYS,
        '    for part in parts:\n        digest.update(len(part).to_bytes(8, "little"))\n',
        "    for part in parts:\n",
        (TESTS + "test_keys.py",),
        "A tenant whose name ends in a fidelity shares KV with another one.",
    ),
    Mutant(
        "adapter-left-out-of-salt",
        KEYS,
        "        parts.append(adapter.digest.encode())\n",
        "        pass\n",
        (TESTS + "test_keys.py",),
        "A LoRA adapter whose files were exchanged is answered from the KV of the former ones.",
    ),
    Mutant(
        "adapter-left-out-of-later-blocks",
        KEYS,
        "extra_keys = of_adapter or None",
        "extra_keys = None",
        (TESTS + "test_keys.py",),
        "The engine names the blocks of a LoRA adapter otherwise than the ingress, and finds nothing of them.",
    ),
    Mutant(
        "secret-left-out-of-salt",
        KEYS,
        'digest = hmac.new(secret.key_for(b"salt"), digestmod=hashlib.sha256)',
        'digest = hmac.new(b"salt", digestmod=hashlib.sha256)',
        (TESTS + "test_keys.py",),
        "A reader of Redis finds out by trying which prompt a key stands for.",
    ),
    Mutant(
        "empty-salt-taken",
        KEYS,
        "    if not salt:\n"
        '        raise ValueError("an empty salt would let tenants and models share KV: pass cache_salt(...)")\n'
        "    hashes: list[BlockHash] = []\n",
        "    hashes: list[BlockHash] = []\n",
        (TESTS + "test_keys.py",),
        "A caller that forgets the salt lets all tenants share KV.",
    ),
    Mutant(
        "partial-block-named",
        KEYS,
        "for start in range(0, len(token_ids) - block_size + 1, block_size):",
        "for start in range(0, len(token_ids), block_size):",
        (TESTS + "test_keys.py",),
        "One block too many: a prompt's last tokens pass for a full block.",
    ),
    Mutant(
        "one-key-for-every-purpose",
        "kvmanager/segments/server_secret.py",
        'return hmac.digest(extracted, purpose + b"\\x01", hashlib.sha256)',
        'return hmac.digest(extracted, b"\\x01", hashlib.sha256)',
        (TESTS + "test_keys.py", TESTS + "test_segment_guard.py"),
        "An attacker who learns the key of tags forges segments with it.",
    ),
    Mutant(
        "sparse-layer-keeps-a-block-less",
        "kvmanager/extensions/sparse/budgets.py",
        "return -(-num_blocks * share.numerator // share.denominator)",
        "return num_blocks * share.numerator // share.denominator",
        ("tests/kvmanager/extensions/sparse/test_budgets.py",),
        "A layer of a short segment keeps nothing, and answers from it are noise.",
    ),
)
