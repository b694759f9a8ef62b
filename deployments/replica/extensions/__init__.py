"""What takes part in a replica's plans (`deployments.replica.plan_extension`): a module each, by name only."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from deployments.replica.plan_extension import EngineTerms, ReplicaExtension

REPLICA_EXTENSIONS = {
    "states": "deployments.replica.extensions.states",
    "sparse": "deployments.replica.extensions.sparse",
    "blend": "deployments.replica.extensions.blend",
}
"""The module of each, by the name of its load path and of its extras in queries and plans."""


def asked_extensions(terms: Mapping[str, Any], block_tokens: int) -> list[tuple[str, ReplicaExtension, EngineTerms]]:
    """Return those for which an engine has terms; a module is imported only then."""
    return [
        (name, _made(name), EngineTerms(terms[name], block_tokens))
        for name in REPLICA_EXTENSIONS
        if terms.get(name) is not None
    ]


@functools.cache
def _made(name: str) -> ReplicaExtension:
    made: ReplicaExtension = importlib.import_module(REPLICA_EXTENSIONS[name]).build()
    return made
