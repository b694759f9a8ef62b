"""What adds to plans (`kvmanager.moves.plan_draft`): KV that a prompt's own chain of segments does not bring.

A folder each. May import every other room; nothing in `kvmanager` imports one, and `plan_extensions` by name only.
"""

import importlib
from collections.abc import Collection

from kvmanager.loading.load_choice import LoadChoice
from kvmanager.moves.plan_draft import PlanExtension

PLAN_EXTENSIONS = {
    "states": "kvmanager.extensions.states.plans",
    "sparse": "kvmanager.extensions.sparse.plans",
    "blend": "kvmanager.extensions.blend.plans",
}
"""The module of each, in the order in which they are asked. A sparse prefix is a prompt's own chain to a blend. An
engine with states asks for neither."""


def plan_extensions(names: Collection[str], loads: LoadChoice | None = None) -> tuple[PlanExtension, ...]:
    """Make those of these names; others are none of plans. ``loads``: judges by rates; None: all stored is taken.

    A module is imported only where its extension is wanted.
    """
    wanted = [module for name, module in PLAN_EXTENSIONS.items() if name in names]
    return tuple(importlib.import_module(module).build(loads) for module in wanted)
