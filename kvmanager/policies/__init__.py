"""Eviction policies by name. To add one: a file beside `lfu.py` and a line here."""

from collections.abc import Callable

from kvmanager.policies.base import EvictionPolicy
from kvmanager.policies.lfu import DecayedLfu

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lfu": DecayedLfu}


def make_policy(name: str) -> EvictionPolicy:
    """Return a new policy for one location. Raises ValueError for a name that is not known."""
    if name not in _POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; choose one of {sorted(_POLICIES)}")
    return _POLICIES[name]()
