"""How many bytes of bodies are being received at the same time, or announced: of all requests, and of one tenant's.

Invariants:

* of each body the first `FREE_BYTES` do not count, so that large bodies, or slow ones, keep no small one out;
* what counts is at most `most_bytes`, and of one tenant at most `most_of_one_bytes`;
* a body that has been received, refused or given up counts no more.

A body without room is refused, and does not wait: Ray Serve receives for the ingress, as much as comes. On the
ingress's event loop.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType

OPEN_BODIES_BYTES = 64 * 1024**2
"""Of all bodies, and at least one body's most."""
FREE_BYTES = 16 * 1024
TENANTS_SHARE = 0.25


class NoRoomError(Exception):
    """There is no room for a body's next bytes."""


class OpenBodies:
    """All of one ingress."""

    def __init__(self, most_bytes: int, largest_bytes: int) -> None:
        """A tenant's part is a quarter of `most_bytes`, and at least a body of `largest_bytes`."""
        self.most_of_one_bytes = max(int(most_bytes * TENANTS_SHARE), largest_bytes)
        self.most_bytes = max(most_bytes, largest_bytes)
        self._of: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """What counts now."""
        return self._of.total()

    def open(self, tenant: str) -> OpenBody:
        """One more body, as a context manager that ends with it."""
        return OpenBody(self, tenant)

    def _grow(self, tenant: str, by: int) -> None:
        if self._of[tenant] + by > self.most_of_one_bytes or self.nbytes + by > self.most_bytes:
            raise NoRoomError
        self._of[tenant] += by

    def _end(self, tenant: str, counted: int) -> None:
        self._of[tenant] -= counted
        if not self._of[tenant]:
            del self._of[tenant]


class OpenBody:
    """One body that is being received."""

    def __init__(self, all_of_them: OpenBodies, tenant: str) -> None:
        self._all = all_of_them
        self._tenant = tenant
        self._counted = 0

    def __enter__(self) -> OpenBody:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._all._end(self._tenant, self._counted)

    def has(self, nbytes: int) -> None:
        """Record that the body has `nbytes` by now, or will have. Raises NoRoomError."""
        counts = max(nbytes - FREE_BYTES, 0)
        if counts > self._counted:
            self._all._grow(self._tenant, counts - self._counted)
            self._counted = counts
