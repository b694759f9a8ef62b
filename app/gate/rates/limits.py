"""Requests and tokens per minute of each tenant: 429 with `Retry-After`, and OpenAI's headers `x-ratelimit-*`.

A request counts when it arrives, whatever it asks for. Before a prompt is sent it counts its tokens, and those that
its request asks for at most (`max_tokens`, times `n`), or, where it does not say, those that are expected. What was not
generated is given back at the end, and what was generated beyond that is taken then. So a tenant may run into debt by
the answers under way, and waits until it is paid. Reused prompt tokens count as others do. What could never fit is
refused as a bad request, for waiting would not help.

State is a pair of buckets for each tenant of the settings. One event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError

from app.gate.auth import CALLER, OPEN_PATHS, route_path
from app.gate.errors import OverloadedError, error_response
from configs.settings import Settings

SPEND = "crosskv.spend"
"""Key of the `Spend` in an ASGI scope; absent where its tenant has no limit."""


class TenantRates:
    """The buckets of one tenant; None: no limit."""

    def __init__(self, requests: int | None, tokens: int | None, now: float) -> None:
        self.requests = TokenBucket(requests, now) if requests else None
        self.tokens = TokenBucket(tokens, now) if tokens else None

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers: the limit, what is left of it, and when it is whole again."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.full_in_s(now))
        return found


class RateLimits:
    """The limits of all tenants. `clock` gives seconds and does not jump."""

    def __init__(
        self,
        settings: Settings,
        count_refusal: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.count_refusal = count_refusal
        http = settings.http
        requests, tokens = settings.of_tenants("requests_per_minute"), settings.of_tenants("tokens_per_minute")
        self._rates = {
            tenant: TenantRates(
                requests.get(tenant, http.requests_per_minute),
                tokens.get(tenant, http.tokens_per_minute),
                clock(),
            )
            for tenant in http.tenants or ("",)
        }

    def of(self, tenant: str) -> TenantRates | None:
        """A tenant's buckets; None when nothing is limited."""
        rates = self._rates.get(tenant)
        return rates if rates is not None and (rates.requests or rates.tokens) else None


class Spend:
    """The tokens of one HTTP request: reserved, used, and settled at its end."""

    def __init__(self, limits: RateLimits, rates: TenantRates) -> None:
        self.retry_after_s: float | None = None
        """Set when it was refused."""
        self._limits = limits
        self._rates = rates
        self._reserved = 0
        self._used = 0

    def begin(self) -> str | None:
        """Count the request; returns the sentence with which it is refused, if it is."""
        now, requests, tokens = self._limits.clock(), self._rates.requests, self._rates.tokens
        if tokens is not None and tokens.wait_s(1, now):
            return self._refuse("tokens", tokens, 1, now)
        if requests is not None and not requests.take(1, now):
            return self._refuse("requests", requests, 1, now)
        return None

    def reserve(self, prompt_tokens: int, answer_tokens: int, expected_tokens: int = 0) -> None:
        """Reserve the tokens of a prompt that is about to be sent; `answer_tokens`: what it asks for in all answers.

        `expected_tokens`: it says nothing, but these are likely; no more is reserved than could ever fit.

        Raises:
            VLLMValidationError: more than a minute's limit.
            OverloadedError: more than is left of it now.
        """
        bucket, wanted, now = self._rates.tokens, prompt_tokens + answer_tokens, self._limits.clock()
        if bucket is None:
            return
        if wanted > bucket.per_minute:
            asks = f" and it asks for {answer_tokens} more. Shorten it or lower max_tokens." if answer_tokens else "."
            raise VLLMValidationError(
                f"The request is too large for the limit of {bucket.per_minute} tokens per minute: its prompt has "
                f"{prompt_tokens} tokens{asks}",
                parameter="max_tokens" if answer_tokens else None,
            )
        wanted = min(wanted + expected_tokens, bucket.per_minute)
        if not bucket.take(wanted, now):
            raise OverloadedError(self._refuse("tokens", bucket, wanted, now))
        self._reserved += wanted

    def use(self, tokens: int) -> None:
        """Count tokens of prompts that were sent, or of answers that were generated."""
        self._used += tokens

    def hand_over(self) -> Spend:
        """Move what is reserved and used so far to a new `Spend`, for work that outlives the request and settles it."""
        taken = Spend(self._limits, self._rates)
        taken._reserved, taken._used = self._reserved, self._used
        self._reserved = self._used = 0
        return taken

    def settle(self) -> None:
        """The request has ended: take or give back what it used more or less than was reserved. Idempotent."""
        if self._rates.tokens is not None:
            self._rates.tokens.correct(self._used - self._reserved, self._limits.clock())
        self._reserved = self._used = 0

    def headers(self) -> dict[str, str]:
        """See `TenantRates.headers`; with `retry-after` for a request that was refused."""
        found = self._rates.headers(self._limits.clock())
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return found

    def _refuse(self, what: str, bucket: TokenBucket, amount: int, now: float) -> str:
        self._limits.count_refusal(f"{what}_per_minute")
        self.retry_after_s = bucket.wait_s(amount, now)
        return (
            f"Rate limit reached: {bucket.per_minute} {what} per minute. Please try again in "
            f"{duration(self.retry_after_s)}."
        )


class RateLimitMiddleware:
    """Counts every request of a limited tenant but probes, and writes OpenAI's headers into every answer to it."""

    def __init__(self, app: ASGIApp, limits: RateLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        rates = self.limits.of(scope[CALLER].tenant) if scope["type"] == "http" else None
        if rates is None or route_path(scope) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        spend = scope[SPEND] = Spend(self.limits, rates)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(spend.headers())
            await send(message)

        sentence = spend.begin()
        if sentence is not None:
            await error_response(HTTPStatus.TOO_MANY_REQUESTS, sentence)(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            spend.settle()


def duration(seconds: float) -> str:
    """As OpenAI's headers have it: `120ms`, `1.5s`, `6m0s`, `1h2m3s`."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".")
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


# A token bucket: `per_minute` on average, and up to a minute's worth at once.
#
# Its level may fall below zero: the cost of an answer is known at its end only. A negative level refuses requests until
# it refills, so the average holds. Every method is given the time, in seconds on a clock that does not jump; a step
# backwards is ignored. O(1). Pure; not thread-safe.


MINUTE_S = 60.0


class TokenBucket:
    """`per_minute` > 0; full at first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        """Take `amount`; False, and nothing is taken, when there is less."""
        self._fill(now)
        if self._level < amount:
            return False
        self._level -= amount
        return True

    def correct(self, amount: float, now: float) -> None:
        """Take `amount` whatever there is (less than 0: give it back, up to a full bucket)."""
        self._fill(now)
        self._level = min(float(self.per_minute), self._level - amount)

    def remaining(self, now: float) -> int:
        """What could be taken now."""
        self._fill(now)
        return max(0, int(self._level))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken if nothing else is taken; infinite when it never can."""
        self._fill(now)
        if amount > self.per_minute:
            return float("inf")
        return max(0.0, amount - self._level) * MINUTE_S / self.per_minute

    def full_in_s(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return self.wait_s(float(self.per_minute), now)

    def _fill(self, now: float) -> None:
        if now > self._at:
            gained = (now - self._at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + gained)
            self._at = now
