"""What the control API asks of the KV manager (`deployments.manager.control`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from kvmanager.moves.directives import DirectiveKind, Move
from kvmanager.segments.keys import BlockHash

PARTS_ANSWER_S = 2.0
CLEAR_S = 8.0


class ManagerControl:
    """One method for each call. A late answer, and what the manager raises, becomes a 503.

    A tenant is named by its tag; `whose` None: any tenant's. What cannot be done is answered
    `{"refused": reason, "message": sentence}`. Answers are JSON objects as the API shows them.
    """

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    async def lookup(self, hashes: Sequence[bytes], most_blocks: int | None = None) -> dict[str, Any]:
        """Where the KV of a prompt with these block hashes lies now (`KVManager.lookup`)."""
        return await self._ask("lookup", hashes, most_blocks)

    async def stored_blocks(self, sequences: Sequence[Sequence[bytes]], timeout_s: float) -> list[int] | None:
        """How many leading blocks of each sequence the shared tiers have; None without an answer in time."""
        try:
            found: list[int] = await self._ask("stored_blocks", sequences, timeout_s=timeout_s)
        except ManagerUnavailableError:
            return None
        return found

    async def stats(self) -> dict[str, Any]:
        """The manager's figures (`KVManager.stats`)."""
        return await self._ask("stats")

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """What a tenant may know of them (`KVManager.tenant_stats`)."""
        return await self._ask("tenant_stats", tenant)

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        """The index as a tree (`kvmanager.views.tree`), of one tenant or of all; None: there is no such root."""
        found: dict[str, Any] | None = await self._ask("trie", tenant, root, depth, most)
        return found

    async def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        """What changes from second to second (`deployments.manager.reports`), with these tenants' own.

        `seen`: the number of the last order that was heard of; -1: none.
        """
        return await self._ask("live", seen, tenants)

    async def clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """Forget all KV in these tiers (`device`, `cpu`, `redis`), or a tenant's; returns what was cleared."""
        return await self._ask("clear", list(tiers), CLEAR_S, tenant, timeout_s=CLEAR_S + 1.0)

    async def pin(self, hashes: Sequence[bytes], ttl_s: float, tenant: str) -> dict[str, Any]:
        """Keep the known beginning of a tenant's prompt for `ttl_s`."""
        return await self._ask("pin", hashes, ttl_s, tenant)

    async def unpin(self, hashes: Sequence[bytes], tenant: str) -> dict[str, Any]:
        """End a tenant's pin."""
        return await self._ask("unpin", hashes, tenant)

    async def pin_node(self, node: bytes, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        """Pin a segment and all that it follows on; without a time: unpin."""
        return await self._ask("pin_node", node, ttl_s, whose)

    async def hashes_to(self, node: bytes, whose: str | None) -> dict[str, Any]:
        """The `hashes` of a segment's blocks and of all that it follows on."""
        return await self._ask("hashes_to", node, whose)

    async def would_clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """What `clear` would take, by tier."""
        return await self._ask("would_clear", list(tiers), tenant)

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
        """Take what only one prompt needs out of tiers (`deployments.manager.prompt_control`), or say what would go.

        Answers as `prefetch` does, with amounts by tier; refused where nothing was begun.
        """
        asked = hashes, node, whose, list(tiers), replica, deadline_s, dry_run
        return await self._ask("evict_prompt", *asked, timeout_s=PARTS_ANSWER_S + (0 if dry_run else deadline_s))

    async def would_move(self, hashes: Sequence[bytes], source: int, target: int) -> dict[str, Any]:
        """What `move` would do."""
        return await self._ask("would_move", hashes, source, target)

    async def compress(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """Let a prompt's segments be copied to Redis now; how far that is."""
        return await self._ask("compress", hashes)

    async def compressed(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """How far that is (`kvmanager.moves.prompt_orders.Compressed`)."""
        return await self._ask("compressed", hashes)

    async def prefetch(self, hashes: Sequence[bytes], replica: int, deadline_s: float) -> dict[str, Any]:
        """Bring a prompt's known beginning to a replica's device.

        Answers when it has ended: `outcome` is "done" or the reason why not, with a `message` then.
        """
        asked = DirectiveKind.ONBOARD.value, replica, hashes, deadline_s
        return await self._ask("direct", *asked, timeout_s=deadline_s + PARTS_ANSWER_S)

    async def move(self, hashes: Sequence[bytes], source: int, target: int, deadline_s: float) -> dict[str, Any]:
        """Move a prompt's known beginning between two replicas' devices; answers as `prefetch` does."""
        wanted = Move(source, target, [BlockHash(name) for name in hashes])
        return await self._ask("move", wanted, deadline_s, timeout_s=deadline_s + PARTS_ANSWER_S)

    async def _ask(self, call: str, *args: Any, timeout_s: float = PARTS_ANSWER_S) -> Any:
        return await self._manager.ask("api", call, *args, timeout_s=timeout_s)
