"""What a node's prefetch workers say of their coding, added up so that it never falls when one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from deployments.segment_store.codec_meter import added_up

ANSWER_S = 0.5
"""Metrics are waited for at the ingress; who does not answer now is counted as it was."""


class CodecReports:
    """The last report of each worker that there ever was. On the tier's event loop."""

    def __init__(self) -> None:
        self._last: dict[Any, dict[str, dict[str, Any]]] = {}
        self._ended: dict[str, dict[str, Any]] = {}

    async def report(self, workers: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Ask these workers, the present ones, and add up what all have said. See `CodecMeter.report`."""
        answers = await asyncio.gather(*map(_asked, workers))
        self._last |= {worker: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}
        for worker in self._last.keys() - set(workers):
            self._ended = added_up([self._ended, self._last.pop(worker)])
        return added_up([self._ended, *self._last.values()])


async def _asked(worker: Any) -> dict[str, dict[str, Any]] | None:
    try:
        answer: dict[str, dict[str, Any]] = await asyncio.wait_for(worker.codec_report.remote(), ANSWER_S)
    except (TimeoutError, ray.exceptions.RayError):
        return None
    return answer
