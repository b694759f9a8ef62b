"""What names a sparse prefix: which copies these budgets read, what is kept of them, and the salt of its prompts.

Pure: any thread.
"""

import hashlib
from collections.abc import Sequence

from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.segments.forms import DENSE, LEVEL_BYTES


def serves(form: bytes, budgets: Budgets | None) -> bool:
    """Return whether a copy of this form is of use to a reader with these budgets; None: dense KV only."""
    if form == DENSE:
        return True
    return budgets is not None and form[:LEVEL_BYTES] == budgets.header_level.to_bytes(LEVEL_BYTES, "little")


def kept_digest(budgets: Budgets, forms: Sequence[bytes]) -> bytes:
    """Return 32 bytes that name what is kept of a prefix: of the budgets, and of each segment what its form says."""
    digest = hashlib.sha256(b"crosskv-kept" + budgets.digest)
    for form in forms:
        digest.update(len(form).to_bytes(2, "little") + form)
    return digest.digest()


def sparse_salt(salt: str, last_key: bytes, kept: bytes) -> str:
    """Return the salt (64 hex characters) of prompts that begin with one sparse prefix, of which not all KV is kept.

    ``salt`` is the tolerant one, ``last_key`` the key of the prefix's last segment, ``kept`` a digest of what is kept:
    of the budgets, and of the choice of tokens where equal budgets may leave different ones. A block of such a prefix
    holds what is kept of *all* of it, not of the tokens up to the block. So a prompt that shares only a part of it must
    find nothing, and each prefix has names of its own. Each part is hashed with its length before it. Raises ValueError
    for an empty salt, which would share KV between tenants.
    """
    if not salt:
        raise ValueError("an empty salt would let tenants and models share KV: pass cache_salt(...)")
    digest = hashlib.sha256(b"crosskv-sparse")
    for part in (salt.encode(), last_key, kept):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
