"""The workloads by name, and their size: all lengths by one factor, the working set by how many documents or users."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from load_tests.workloads import chunks, documents, groups, rounds, stragglers, traces
from load_tests.workloads.limits import at_least, positive
from load_tests.workloads.prefixes import working_set_tokens
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Workload

WORKLOADS: dict[str, Callable[..., Workload]] = {
    documents.NAME: documents.long_document_qa,
    rounds.NAME: rounds.multi_round_qa,
    groups.NAME: groups.shared_prefix_groups,
    stragglers.NAME: stragglers.straggler_burst,
    traces.NAME: traces.conversation_trace,
    chunks.NAME: chunks.rearranged_chunks,
}
COUNTS = {
    documents.NAME: "documents",
    rounds.NAME: "users",
    groups.NAME: "groups",
    stragglers.NAME: "long_requests",
    traces.NAME: "requests",
    chunks.NAME: "documents",
}
"""The parameter that a workload's working set grows with."""
_LENGTH = "_tokens"
_MOST_TRIES = 8
_MOST_GROWTH = 4
"""Of the count, from one try to the next: a trace's working set is nothing at first and then grows fast."""
_NEAR_ENOUGH = 0.02


def parameters(name: str, length_scale: float = 1.0) -> dict[str, Any]:
    """Return a workload's own parameters, every length multiplied by ``length_scale`` (at least one token).

    Raises ValueError for an unknown name and for a scale that is not above zero.
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}.")
    positive(length_scale=length_scale)
    own = {key: value.default for key, value in inspect.signature(WORKLOADS[name]).parameters.items()}
    return {
        key: max(1, round(value * length_scale)) if key.endswith(_LENGTH) and value is not None else value
        for key, value in own.items()
        if value is not inspect.Parameter.empty
    }


def with_working_set(name: str, seed: int | str, text: Words, tokens: int, **chosen: Any) -> Workload:
    """Return the workload whose working set is nearest to ``tokens``, by its number of documents, users or groups.

    ``chosen`` are parameters of the maker. Where requests are given by time, as for `shared_prefix_groups`, they must
    be enough for that number of prefixes to come back. Raises ValueError as the maker does.
    """
    at_least(1, tokens=tokens)
    count_name = COUNTS[name]
    count = chosen.pop(count_name, parameters(name)[count_name])
    tried: dict[int, tuple[int, Workload]] = {}
    while len(tried) < _MOST_TRIES and count not in tried:
        workload = WORKLOADS[name](random.Random(seed), text, **{**chosen, count_name: count})
        tried[count] = working_set_tokens(workload), workload
        if abs(tried[count][0] - tokens) <= _NEAR_ENOUGH * tokens:
            break
        count = _next_count({count: found for count, (found, _) in tried.items()}, tokens)
    return min(tried.values(), key=lambda one: abs(one[0] - tokens))[1]


def _next_count(found: dict[int, int], tokens: int) -> int:
    """Between the nearest counts below and above, or in proportion; ``found`` are working sets by count."""
    low = max((count for count, size in found.items() if size < tokens), default=None)
    high = min((count for count, size in found.items() if size >= tokens), default=None)
    if low is None and high is not None:
        return max(1, high * tokens // found[high])
    if low is not None and high is None:
        return min(_MOST_GROWTH * low, max(low + 1, round(low * tokens / max(1, found[low]))))
    assert low is not None
    assert high is not None
    return low + round((high - low) * (tokens - found[low]) / (found[high] - found[low]))
