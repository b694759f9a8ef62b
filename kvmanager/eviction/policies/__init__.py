"""Eviction policies by name. To add one: a file next to `lru.py` and a line here."""

import importlib
import inspect

from kvmanager.eviction.policies.lfu import DecayedLfu, LearnedLfu
from kvmanager.eviction.policies.lru import Lru
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting

__all__ = ["EvictionPolicy", "PolicySetting", "find_policy", "make_policy", "policy_names"]

_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lfu": LearnedLfu,
    "decayed-lfu": DecayedLfu,
    "lru": Lru,
}


def policy_names() -> list[str]:
    """Return the names that `make_policy` knows, the default first."""
    return list(_POLICIES)


def make_policy(name: str, setting: PolicySetting) -> EvictionPolicy:
    """Return a new policy for one partition of a location, by its name or as "module:Class".

    Raises ValueError for a name that is not known, and for a class that is no policy or cannot be made.
    """
    policy = find_policy(name)
    try:
        return policy(setting)
    except Exception as error:
        raise ValueError(
            f"eviction policy {name!r} cannot be made: {type(error).__name__}: {error}; its constructor takes one "
            "PolicySetting"
        ) from error


def find_policy(name: str) -> type[EvictionPolicy]:
    """Return the class of a name or of "module:Class". Raises ValueError when there is none, or it is no policy."""
    if name in _POLICIES:
        return _POLICIES[name]
    if ":" not in name:
        known = ", ".join(policy_names())
        raise ValueError(f'unknown eviction policy {name!r}: choose one of {known}, or name a class as "module:Class"')
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ValueError(
            f"eviction policy {name!r} cannot be imported: {type(error).__name__}: {error}; it must name a class "
            'on the Python path as "module:Class"'
        ) from error
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ValueError(f"eviction policy {name!r} is no subclass of kvmanager.index.eviction_policy.EvictionPolicy")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"eviction policy {name!r} lacks methods that every policy has: {missing}")
    return found
