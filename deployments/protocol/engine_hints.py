"""What a request tells the engine beyond vLLM's own parameters, as one value in vLLM's `kv_transfer_params`.

The replica writes it in the place of whatever a client put there (`deployments.engine.handle`). In the replica's own
process it is passed on as it is; into an engine's process vLLM sends it by msgspec, and `hints_of` checks its types
when it makes it one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import EXACT, Fidelity

T = TypeVar("T")

HINTS: Final = "crosskv_hints"
"""Key of the `EngineHints` in a request's `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class EngineHints:
    """See the module's docstring. A request without hints has these defaults."""

    plan: Plan | None = None
    tenant: str = ""
    """The tenant's tag (`kvmanager.segments.keys.tenant_tag`), empty for none."""
    fidelity: Fidelity = EXACT
    arrived: float | None = None
    """When a prompt that is not exact arrived at the ingress, on `time.monotonic`'s clock of this machine."""
    short_tokens: int = 0
    """Length below which a sequence is not worth a load (`kvmanager.moves.plan.PlanExpectation`); 0: not known."""
    plain_salt: str | None = None
    """The prompt's own salt, where it comes under another one (`EnginePrompt.salt`); None: no other."""
    save_answer: bool = True
    """Whether the answer may come back in a later prompt, so that its KV is stored."""
    predicted_tokens: int | None = None
    """How long the answer is expected to be; None: not known."""
    client_request: str = ""
    """What the client of the HTTP request is told as `x-request-id`, where log lines name requests; else empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHints:
        """Return itself: it never changes. vLLM copies a request's parameters for each of its answers."""
        return self

    def as_transfer(self) -> dict[str, Any]:
        """Return `kv_transfer_params` that hold it."""
        return {HINTS: self}


NO_HINTS: Final = EngineHints()


def hints_of(transfer: dict[str, Any] | None) -> EngineHints:
    """Return what a request's `kv_transfer_params` say; `NO_HINTS` where they say nothing.

    Hints that came from another process are read once, and put back as they are then. Raises
    `msgspec.ValidationError` for what has other types.
    """
    hints = (transfer or {}).get(HINTS)
    if hints is None or transfer is None:
        return NO_HINTS
    if not isinstance(hints, EngineHints):
        hints = transfer[HINTS] = msgspec.convert(hints, EngineHints)
    return hints


def extra(plan: Plan | None, name: str, kind: type[T]) -> T | None:
    """Return what a plan's extras hold for an extension; None: nothing.

    Raises `msgspec.ValidationError` where it came from another process and has other types.
    """
    extras: Mapping[str, Any] = plan.extras if plan is not None else {}
    found = extras.get(name)
    return found if found is None or isinstance(found, kind) else msgspec.convert(found, kind)
