"""Eviction policies of the literature, for comparison: no server has them by name. Also examples of one of your own."""

from kvmanager.eviction.policies import policy_names

_EXAMPLES = {
    "arc": "load_tests.simulator.policies.arc:Arc",
    "slru": "load_tests.simulator.policies.slru:SegmentedLru",
    "w-tinylfu": "load_tests.simulator.policies.w_tinylfu:WTinyLfu",
}
"""Each as "module:Class"."""


def simulated_names() -> list[str]:
    """Return the names that can be simulated: those of the server, the default first, and the examples."""
    return [*policy_names(), *_EXAMPLES]


def served_name(name: str) -> str:
    """Return what `kvmanager.config.ManagerConfig.eviction_policy` takes for a name that can be simulated."""
    return _EXAMPLES.get(name, name)
