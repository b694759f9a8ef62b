"""What the ingress may know of the decode replicas: how much of a prompt the best of them lacks.

The router knows, by its mirror; the ingress asks before it sends, in the same process and on the same loop. Without a
router that has been told of replicas of both roles there is no answer, and nothing is handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deployments.protocol.wire import GenerateRequest

Lacks = Callable[[GenerateRequest], int | None]


class DecodeView:
    """Of one application."""

    def __init__(self) -> None:
        self._lacks: Lacks | None = None

    def tell(self, lacks: Lacks) -> None:
        """A router answers from now on."""
        self._lacks = lacks

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        """Tokens that no device or tier has for the best decode replica; None: there are no roles to speak of."""
        return self._lacks(request) if self._lacks is not None else None


@functools.cache
def decode_view(app_name: str) -> DecodeView:
    """That of an application, as the routers of this process tell it."""
    return DecodeView()
