"""The control API's calls, by name: which part of the manager answers each.

A call names a tenant by its tag; None: an administrator asks, for all tenants. A refusal is an answer
`{"refused": reason, "message": sentence}`, not an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from deployments.manager.control import Control
from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.prompt_control import PromptControl
from deployments.manager.reports import Reports


class ManagerApi:
    """One table of calls, made of the parts that carry them out. On the manager's event loop."""

    def __init__(self, control: Control, orders: PromptControl, reports: Reports, directives: DirectiveSender) -> None:
        self.calls: Mapping[str, Callable[..., Any]] = {
            # What is there.
            "live": reports.live,
            "lookup": reports.lookup,
            "parts": reports.parts,
            "stats": reports.stats,
            "stored_blocks": reports.stored_blocks,
            "tenant_stats": reports.tenant_stats,
            "trie": reports.trie,
            # Tiers and devices.
            "clear": control.clear,
            "direct": control.direct,
            "move": control.move,
            "pin": control.pin,
            "unpin": control.unpin,
            # One prompt's KV.
            "compress": orders.compress,
            "compressed": orders.compressed,
            "evict_prompt": orders.evict,
            "hashes_to": orders.hashes_to,
            "pin_node": orders.pin_node,
            "would_clear": orders.would_clear,
            "would_move": orders.would_move,
            # What Serve says of its replicas.
            "drain": directives.drain,
            "scaling": reports.scaling_decided,
        }

    async def call(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Answer a call. Raises KeyError for a name that is none, and what the part raises."""
        answer = self.calls[name](*args, **options)
        return await answer if inspect.isawaitable(answer) else answer
