"""The control API's calls (`app.backend.protocols.ControlPlane`), to the KV-manager actor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from app.backend.parts_watch import PARTS_ANSWER_S
from deployments.protocol.manager_client import ManagerClient
from kvmanager.moves.directives import DirectiveKind

CLEAR_S = 8.0


class ManagerControl:
    """The control API's calls, to the manager actor."""

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        found: dict[str, Any] = await self._manager.ask("lookup", hashes, timeout_s=PARTS_ANSWER_S)
        return found

    async def stats(self) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        stats: dict[str, Any] = await self._manager.ask("stats", timeout_s=PARTS_ANSWER_S)
        return stats

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        stats: dict[str, Any] = await self._manager.ask("tenant_stats", tenant, timeout_s=PARTS_ANSWER_S)
        return stats

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        """See `app.backend.protocols.ControlPlane`."""
        asked = tenant, root, depth, most
        found: dict[str, Any] | None = await self._manager.ask("trie", *asked, timeout_s=PARTS_ANSWER_S)
        return found

    async def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        found: dict[str, Any] = await self._manager.ask("live", seen, tenants, timeout_s=PARTS_ANSWER_S)
        return found

    async def clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        cleared: dict[str, Any] = await self._manager.ask(
            "clear", list(tiers), CLEAR_S, tenant, timeout_s=CLEAR_S + 1.0
        )
        return cleared

    async def pin(self, hashes: Sequence[bytes], ttl_s: float, tenant: str) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("pin", hashes, ttl_s, tenant, timeout_s=PARTS_ANSWER_S)
        return answer

    async def unpin(self, hashes: Sequence[bytes], tenant: str) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("unpin", hashes, tenant, timeout_s=PARTS_ANSWER_S)
        return answer

    async def pin_node(self, node: bytes, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("pin_node", node, ttl_s, whose, timeout_s=PARTS_ANSWER_S)
        return answer

    async def hashes_to(self, node: bytes, whose: str | None) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("hashes_to", node, whose, timeout_s=PARTS_ANSWER_S)
        return answer

    async def would_clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("would_clear", list(tiers), tenant, timeout_s=PARTS_ANSWER_S)
        return answer

    async def evict(
        self,
        hashes: Sequence[bytes],
        node: bytes | None,
        whose: str | None,
        tiers: Collection[str],
        replica: int | None,
        deadline_s: float,
        dry_run: bool,
    ) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        asked = hashes, node, whose, list(tiers), replica, deadline_s, dry_run
        answer: dict[str, Any] = await self._manager.ask(
            "evict_prompt", *asked, timeout_s=PARTS_ANSWER_S + (0 if dry_run else deadline_s)
        )
        return answer

    async def would_move(self, hashes: Sequence[bytes], source: int, target: int) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        asked = hashes, source, target
        answer: dict[str, Any] = await self._manager.ask("would_move", *asked, timeout_s=PARTS_ANSWER_S)
        return answer

    async def compress(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("compress", hashes, timeout_s=PARTS_ANSWER_S)
        return answer

    async def compressed(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("compressed", hashes, timeout_s=PARTS_ANSWER_S)
        return answer

    async def prefetch(self, hashes: Sequence[bytes], replica: int, deadline_s: float) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask(
            "direct", DirectiveKind.PROMOTE.value, replica, hashes, deadline_s, timeout_s=deadline_s + PARTS_ANSWER_S
        )
        return answer

    async def move(self, hashes: Sequence[bytes], source: int, target: int, deadline_s: float) -> dict[str, Any]:
        """See `app.backend.protocols.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask(
            "direct",
            DirectiveKind.MOVE.value,
            source,
            hashes,
            deadline_s,
            target,
            timeout_s=deadline_s + PARTS_ANSWER_S,
        )  # fmt: skip
        return answer
