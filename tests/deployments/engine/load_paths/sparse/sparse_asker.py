"""Asks a live engine for answers to prompts that begin with a sparse prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from live_engine import BLOCK, SEGMENT_BLOCKS, LiveEngine
from sparse_port import SparsePort, Thinned
from vllm.outputs import RequestOutput

from kvmanager.segments.keys import TOLERANT, block_hashes, cache_salt
from load_tests.harness.engine import SECRET, greedy

NAMES = itertools.count(1)
LAYERS = 6
SEGMENT = SEGMENT_BLOCKS * BLOCK
ANSWER = 48
"""Tokens: more than a block."""


class SparseAsker:
    """All its prompts are tolerant ones."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.port = SparsePort(engine.reuse.copier.layout)
        engine.port = self.port
        self._exact_salt, engine.salt = engine.salt, cache_salt(SECRET, engine.fingerprint, "", TOLERANT)
        self.side: Any = engine.reuse._scheduler_side
        self.path: Any = engine.reuse.paths["sparse"]
        assert self.path.accept(lambda sealed, load, form: self.port.open_kept(sealed, load)) is None

    def thin(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], seed: int = 0) -> Thinned:
        """Compute the prompt's segments densely, store them, forget them, and make the first ones sparse."""
        self.engine.ask(tokens[: len(blocks) * SEGMENT + 1], 1)
        self.engine.clear_device()
        return self.port.thin(self.engine.hashes(tokens), blocks, seed)

    def start(self, tokens: Sequence[int], thinned: Thinned, max_tokens: int = ANSWER, **changes: Any) -> Future[Any]:
        """An answer on its way, with log probabilities."""
        return self.engine.start(self.answer(tokens, thinned, max_tokens, **changes))

    async def answer(self, tokens: Sequence[int], thinned: Thinned, max_tokens: int, **changes: Any) -> RequestOutput:
        """As a room asks the engine."""
        outputs = [output async for output in self.stream(tokens, thinned, max_tokens, **changes)]
        return outputs[-1]

    def stream(self, tokens: Sequence[int], thinned: Thinned, max_tokens: int = ANSWER, **changes: Any) -> Any:
        params = greedy(max_tokens, logprobs=0)
        hints = replace(thinned.hints(self.engine.salt), **changes)
        params.extra_args = {"kv_transfer_params": hints.as_transfer()}
        prompt: Any = {
            "type": "token", "prompt_token_ids": list(tokens), "cache_salt": thinned.salt(self.engine.salt),
        }  # fmt: skip
        return self.engine.llm.generate(prompt, params, f"sparse-{next(NAMES)}")

    def on_device(self, tokens: Sequence[int], thinned: Thinned) -> int:
        """How many of the prompt's leading blocks the device has under the prefix's names."""
        hashes = block_hashes(tokens, BLOCK, thinned.salt(self.engine.salt))
        control = self.engine.reuse.control
        return self.engine.on_engine_thread(lambda: sum(1 for _ in itertools.takewhile(control.has, hashes)))

    def entered(self) -> int:
        """Requests in the presenter's table."""
        return len(self.path.requests._presenter)

    def close(self) -> None:
        self.engine.salt, self.path.requests = self._exact_salt, None
