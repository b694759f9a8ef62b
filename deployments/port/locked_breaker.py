"""A circuit breaker (`kvmanager.circuit_breaker`) that several threads share."""

from __future__ import annotations

import threading

from kvmanager.circuit_breaker import CircuitBreaker, CircuitState


class LockedBreaker:
    """A circuit breaker for several threads."""

    def __init__(self) -> None:
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()

    def allows(self, now: float) -> bool:
        """See `CircuitBreaker.allows`."""
        with self._lock:
            return self._breaker.allows(now)

    def succeeded(self) -> None:
        """See `CircuitBreaker.succeeded`."""
        with self._lock:
            self._breaker.succeeded()

    def failed(self, now: float) -> None:
        """See `CircuitBreaker.failed`."""
        with self._lock:
            self._breaker.failed(now)

    def abandoned(self) -> None:
        """See `CircuitBreaker.abandoned`."""
        with self._lock:
            self._breaker.abandoned()

    @property
    def state(self) -> CircuitState:
        """See `CircuitBreaker.state`."""
        return self._breaker.state
