"""Finds a named actor without blocking the caller: Ray's directory answers when it can, perhaps never.

One search at a time, on a thread of its own, for all callers; the handle found is kept until a caller reports it gone.
Safe from any thread. When the directory hangs, one thread hangs with it, and every caller has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SEARCH_PAUSE_S = 0.25
"""Least time between two searches, so that an actor that is gone costs each caller next to nothing."""
SEARCH_S = 1.0
"""How long a caller without a deadline of its own waits for a search; the search goes on, for later callers."""


class ActorFinder:
    """Keeps the handle of one actor. `find` blocks, and raises when there is no such actor."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._handle: Any = None
        self._search: Future[Any] | None = None
        self._next_search = 0.0

    @property
    def handle(self) -> Any:
        """The handle that was found last; None when there is none, or it was lost."""
        return self._handle

    def search(self) -> Future[Any]:
        """The handle to come, or what `find` raised; soon after a search that failed, what that raised.

        The future is shared: wait for it, never cancel it.
        """
        with self._lock:
            now = time.monotonic()
            last = self._search
            if self._handle is not None:
                found: Future[Any] = Future()
                found.set_result(self._handle)
                return found
            if last is not None and (not last.done() or (last.exception() and now < self._next_search)):
                return last
            self._search = Future()
            self._search.set_running_or_notify_cancel()  # it can no longer be cancelled
            threading.Thread(target=self._run, args=(self._search,), name="crosskv-find-actor", daemon=True).start()
            return self._search

    def wait(self, timeout_s: float) -> Any:
        """The handle, for a thread that may wait. Raises TimeoutError, and what `find` raised."""
        return self._handle or self.search().result(timeout_s)

    def lost(self, handle: Any) -> None:
        """This actor is gone; a successor that was found meanwhile is not."""
        with self._lock:
            if self._handle is handle:
                self._handle = None

    def _run(self, search: Future[Any]) -> None:
        try:
            handle = self._find()
        except BaseException as error:
            with self._lock:
                self._next_search = time.monotonic() + SEARCH_PAUSE_S
            search.set_exception(error)
            return
        with self._lock:
            self._handle = handle
        search.set_result(handle)
