"""What takes part in requests of an ingress (`app.gate.prompt_extra`): a folder each, named here and imported by name.

One whose folder is not there is left out: requests that ask for it are refused.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from app.gate.prompt_extra import IngressExtension

if TYPE_CHECKING:
    from configs.settings import Settings

INGRESS_EXTENSIONS = {"states": "app.extensions.states", "blend": "app.extensions.blend"}
"""The folder of each, by the name of its load path. Its module `ingress` has `build(settings)`."""


def ingress_extensions(settings: Settings) -> dict[str, IngressExtension]:
    """Make those that are there."""
    there = {name: module for name, module in INGRESS_EXTENSIONS.items() if importlib.util.find_spec(module)}
    return {name: importlib.import_module(f"{module}.ingress").build(settings) for name, module in there.items()}
