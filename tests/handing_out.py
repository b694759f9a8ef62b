"""Which process runs which file: the longest first, by what they took when it was stored.

Files that need one thing that is started once (one whole server after the other, the engine of a process, a Ray) are
one piece of work, in one process. Everything else goes file by file to the process that is free. A file is not split,
for its tests share what they start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from xdist.scheduler import LoadScopeScheduling

from tests.durations import FileDurations, file_of, stored

UNKNOWN_S = 5.0
"""A file of which nothing is stored."""
PIECES = ("server", "engine", "ray")
"""What a file needs; where it needs several, the first is what counts."""


SHARED_ENGINE = "engine_slot"
"""The fixture of the engine that most files share; whatever starts another one ends it."""
RAY = "one_ray"
"""The fixture of a process's Ray, which the first test of a file that needs none ends."""
SERVERS = ("plain", "keyed", "world", "process_world", "private_server")
"""Fixtures of whole servers, in the order in which they are started. What plain vLLM answers to the conversations of
`process_world` it has been asked for `world`."""


def piece_of(file: str, known: Mapping[str, FileDurations]) -> str:
    """The piece of work that a file belongs to: one that others share, or itself."""
    needs = known[file].needs if file in known else []
    return next((piece for piece in PIECES if piece in needs), file)


class Pieces(LoadScopeScheduling):
    """pytest-xdist's scheduler of scopes, with pieces of work for scopes; `longest_first` has put them in order."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._known = stored()
        self._pieces: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        if file not in self._pieces:
            self._pieces[file] = piece_of(file, self._known)
        return self._pieces[file]


def rewrite_share(config: pytest.Config, share: int, shares: int) -> None:
    """Rewrite the asserts of every `shares`-th file that `config` collects, where that has not been done.

    In a new clone each process would do so for all of them, at the same time. What one has rewritten lies in
    __pycache__, where the others find it. Leans on pytest's functions behind its import hook.
    """
    places = [Path(argument.partition("::")[0]) for argument in config.args]
    files = {file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])}
    for file in sorted(files)[share::shares]:
        if not file.name.startswith(("test_", "conftest")):
            continue
        path = file.resolve()
        folder = rewrite.get_cache_dir(path)
        kept = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(folder):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)


def longest_first(items: list[pytest.Function]) -> None:
    """Sort the tests by piece of work, and inside of a piece so that no engine, Ray and server is started twice."""
    known = stored()
    pieces = {item.nodeid: piece_of(file_of(item.nodeid), known) for item in items}
    seconds: Counter[str] = Counter()
    for file in {file_of(item.nodeid) for item in items}:
        seconds[piece_of(file, known)] += known[file].seconds if file in known else UNKNOWN_S  # type: ignore[assignment]
    shared = {item.path for item in items if SHARED_ENGINE in item.fixturenames}
    with_ray = {item.path for item in items if RAY in item.fixturenames}
    items.sort(
        key=lambda item: (
            -seconds[pieces[item.nodeid]],
            _server(item),
            pieces[item.nodeid],
            item.path not in shared,
            (item.path in with_ray) == (item.path in shared),  # last with the shared engine, first without
        )
    )


def _server(item: pytest.Function) -> int:
    """The place of the server that a test needs among those that are started one after the other."""
    return next((place for place, name in enumerate(SERVERS) if name in item.fixturenames), len(SERVERS))
