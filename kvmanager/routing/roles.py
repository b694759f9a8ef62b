"""Which replicas prefill and which decode. Roles are soft: every replica can do both, and does where one is missing.

The manager gives each replica a role when it registers, and keeps it while the replica is there. Serve's numbers change
when replicas come and go, so nothing is read from them. A replica that comes while all roles are held is a successor
whose predecessor is not gone yet: it has no role, does both, and takes the first that becomes free. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Phase = Literal["", "prefill", "decode"]
"""What a request is sent for; empty: all of it, to any replica."""


class Role(StrEnum):
    """What a replica is chosen for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RoleShares:
    """The wanted number of replicas of each role; without it there are no roles."""

    prefill: int = 0
    decode: int = 0

    def __bool__(self) -> bool:
        return self.prefill > 0 and self.decode > 0


class RoleBook:
    """Roles by replica. All methods are O(replicas)."""

    def __init__(self, shares: RoleShares) -> None:
        self._wanted = {Role.PREFILL: shares.prefill, Role.DECODE: shares.decode} if shares else {}
        self._roles: dict[str, Role] = {}
        self._without: dict[str, None] = {}
        """Replicas that wait for a role, the first to come first."""

    @property
    def roles(self) -> dict[str, str]:
        """Role by replica; those without one are left out."""
        return {replica: role.value for replica, role in self._roles.items()}

    def join(self, replica: str) -> str:
        """A replica has registered, perhaps again: its role, empty for none."""
        if self._wanted and replica not in self._roles:
            self._without.setdefault(replica)
            self._share_out()
        return self._roles.get(replica, "")

    def leave(self, replica: str) -> None:
        """A replica is gone, and its role free for the next."""
        self._without.pop(replica, None)
        if self._roles.pop(replica, None) is not None:
            self._share_out()

    def _share_out(self) -> None:
        for replica in list(self._without):
            held = list(self._roles.values())
            free = {role: (wanted - held.count(role)) / wanted for role, wanted in self._wanted.items()}
            role = max(free, key=lambda one: free[one])  # that of which the larger share is missing
            if free[role] <= 0:
                return
            del self._without[replica]
            self._roles[replica] = role


def fit_for(names: Sequence[str], phase: Phase, roles: Mapping[str, str]) -> list[str]:
    """Return those of ``names`` that a request's phase may go to, all where none has its role.

    A replica without a role does both.
    """
    if not phase:
        return list(names)
    return [name for name in names if roles.get(name, phase) == phase] or list(names)


def in_use(names: Sequence[str], roles: Mapping[str, str]) -> bool:
    """Whether ``names`` include replicas of both roles: only then is anything to be handed over."""
    held = {roles.get(name) for name in names}
    return Role.PREFILL.value in held and Role.DECODE.value in held
