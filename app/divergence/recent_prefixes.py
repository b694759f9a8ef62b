"""How the last prompts began, and how often one began otherwise with the same text behind.

Invariants:

* compared are prompts of one tenant and one salt; what others send is neither compared nor counted there;
* of each tenant the last `REMEMBERED` beginnings are kept, of all tenants `REMEMBERED_IN_ALL` or one each, in the
  ingress's memory only; nothing of them is logged, and only numbers leave;
* counted is a prompt whose first segment is that of none of them, but that has a whole segment in common with one,
  behind at most `MOST_APART` tokens of its own. So other prompts, however they begin, do not count;
* a prompt costs one hash of its first segment. One that begins as none before costs some searches too, and one that
  has parted costs decoding some hundred tokens. Nothing here raises.

Not safe for threads: the ingress's event loop only.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from app.divergence.divergence import ID_BYTES, MOST_APART, Divergence, cause_of, divergence
from app.metrics.labels import PARTED, PARTED_DEFECT

logger = logging.getLogger(__name__)

REMEMBERED, REMEMBERED_IN_ALL = 8, 4096
MOST_SEGMENT_TOKENS = 512
"""Tokens that count of a larger segment: a head weighs 5 KiB at most."""


class RecentPrefixes:
    """See the module's docstring."""

    def __init__(
        self, tenants: Collection[str], segment_tokens: int, tokenizer: Any, count: Callable[[str], None]
    ) -> None:
        """`tenants`: all that there are; none means that there is one. `count` is told one of `PARTED` each time."""
        names = tuple(tenants) or ("",)
        self._segment = min(segment_tokens, MOST_SEGMENT_TOKENS)
        self._most = min(REMEMBERED, max(1, REMEMBERED_IN_ALL // len(names)))
        self._tokenizer = tokenizer
        self._marks = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._count = count
        self._prefixes: dict[str, OrderedDict[bytes, tuple[str, bytes]]] = {name: OrderedDict() for name in names}
        """By tenant and the digest of salt and first segment: the salt and the head, least recently used first."""
        self._counted: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._prompts: Counter[str] = Counter()
        self._said = False

    def see(self, tenant: str, salt: str, token_ids: Sequence[int]) -> None:
        """A prompt has come."""
        try:
            self._see(tenant, salt, token_ids)
        except Exception:
            self._count(PARTED_DEFECT)
            if not self._said:
                self._said = True
                logger.exception("where prompts part cannot be told; further failures are only counted")

    def of(self, tenant: str) -> dict[str, Any]:
        """Of a tenant's prompts that are no shorter than a segment: how many there were, and how many have parted."""
        counted = self._counted.get(tenant, Counter())
        return {"prompts": self._prompts[tenant], "parted": {cause: counted[cause] for cause in PARTED}}

    def cause(self, first: Sequence[int], second: Sequence[int], where: Divergence) -> str:
        """What keeps two prompts apart, by its looks; one of `PARTED`."""
        return cause_of(first, second, where, self._text, self._marks)

    def _see(self, tenant: str, salt: str, token_ids: Sequence[int]) -> None:
        if len(token_ids) < self._segment:
            return
        self._prompts[tenant] += 1
        now = array("i", token_ids[: 2 * self._segment + MOST_APART])
        head = now.tobytes()
        own = self._prefixes[tenant]
        digest = hashlib.blake2b(head[: self._segment * ID_BYTES], digest_size=16)
        digest.update(salt.encode("utf-8", "surrogatepass"))
        key = digest.digest()
        if key not in own:
            for other_salt, other in reversed(own.values()):
                where = divergence(head, other, self._segment) if other_salt == salt else None
                if where is not None:
                    cause = self.cause(now, array("i", other), where)
                    self._counted[tenant][cause] += 1
                    self._count(cause)
                    break
        own[key] = salt, head
        own.move_to_end(key)
        if len(own) > self._most:
            own.popitem(last=False)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
