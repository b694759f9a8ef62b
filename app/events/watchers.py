"""The clients that watch, and the events that wait to be sent to each.

Invariants: at most `MOST_WATCHERS` watch, `MOST_OF_A_TENANT` of one tenant; tenants together do not keep administrators
out. For each watcher wait at most `MOST_WAITING` events, of which the oldest is dropped, and it is told how many were
(`dropped`); of the figures of a second only the newest wait. A watcher is told of its own tenant only, an administrator
of all. Telling costs O(watchers). One event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from app.gate.auth import Caller
from app.gate.errors import OverloadedError, UnavailableError

MOST_WATCHERS = 64
MOST_OF_A_TENANT = 8
MOST_WAITING = 256

Event = tuple[str, dict[str, Any]]
"""Its name, and what it says."""
LAST: Event = ("restarting", {})
"""What a server says that stops or restarts; a stream ends with it."""


class Watcher:
    """One client that watches."""

    def __init__(self, caller: Caller) -> None:
        self.tenant = caller.tenant
        self.admin = caller.admin
        self._waiting: deque[Event] = deque()
        self._figures: Event | None = None
        self._dropped = 0
        self._there = asyncio.Event()

    def sees(self, tenant: str) -> bool:
        """Whether it may know what a tenant does."""
        return self.admin or tenant == self.tenant

    def tell(self, event: Event) -> None:
        """Let an event wait; the oldest gives way."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._there.set()

    def show(self, figures: Event) -> None:
        """Let these figures wait in place of older ones."""
        self._figures = figures
        self._there.set()

    async def next(self, timeout_s: float) -> list[Event]:
        """What waits, oldest first, as soon as there is anything; nothing after `timeout_s`."""
        try:
            await asyncio.wait_for(self._there.wait(), timeout_s)
        except TimeoutError:
            return []
        self._there.clear()
        found = [("dropped", {"events": self._dropped})] if self._dropped else []
        found += self._waiting
        if self._figures is not None:
            found.append(self._figures)
        self._waiting.clear()
        self._figures, self._dropped = None, 0
        return found


class Watchers:
    """All clients that watch through this ingress. `changed` is called when one has come or gone."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        self._watchers: dict[Watcher, None] = {}
        self._of_tenant: Counter[str] = Counter()
        self._ended = False

    def __len__(self) -> int:
        return len(self._watchers)

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._watchers)

    @contextmanager
    def one_more(self, caller: Caller) -> Iterator[Watcher]:
        """A watcher, for as long as it watches.

        Raises:
            OverloadedError: there are as many as there may be.
            UnavailableError: this server ends; another one may take its place.
        """
        if self._ended:
            raise UnavailableError("The server is stopping or restarting. Please try again later.")
        full = not caller.admin and len(self._watchers) >= MOST_WATCHERS
        if full or self._of_tenant[caller.tenant] >= MOST_OF_A_TENANT:
            raise OverloadedError("Too many clients watch already. Please close one, or try again later.")
        watcher = Watcher(caller)
        self._watchers[watcher] = None
        self._of_tenant[caller.tenant] += 1
        self.changed()
        try:
            yield watcher
        finally:
            del self._watchers[watcher]
            self._of_tenant[caller.tenant] -= 1
            if not self._of_tenant[caller.tenant]:
                del self._of_tenant[caller.tenant]
            self.changed()

    def end(self) -> None:
        """Let all go, and take no more: a server that ends waits for its streams."""
        self._ended = True
        for watcher in self._watchers:
            watcher.tell(LAST)

    def tell(self, tenant: str, name: str, said: dict[str, Any], more_for_admins: dict[str, Any]) -> None:
        """Something has happened to a tenant."""
        for watcher in self._watchers:
            if watcher.sees(tenant):
                watcher.tell((name, {**said, **more_for_admins} if watcher.admin else said))

    def tell_admins(self, name: str, said: dict[str, Any]) -> None:
        """Something has happened that concerns all tenants, or none."""
        for watcher in self._watchers:
            if watcher.admin:
                watcher.tell((name, said))
