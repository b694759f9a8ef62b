"""What decoding gains where half of a prefix's KV is kept: `python -m load_tests.micro.sparse_decode`.

One prompt, whose prefix is on the device, dense or sparse: time per output token of one answer at a time, or of
several at once. Each layer and KV head keeps a random half of each segment's tokens, so what is read is halved and the
answers are noise. The arms take turns in one engine. Two of them are dense: with the presenter in place, which a step
without a sparse request should not feel, and with vLLM's own method as if no sparse request had ever come.

The default model has 45 million random parameters; with `--model` any folder, such as what
`python -m load_tests.harness.models 365m` makes. No HTTP, no tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from configs.settings import load_settings
from load_tests.harness.engine import Engine, greedy, prompt, start_with_engine_threads, timed
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.models import write_random_model
from load_tests.measuring import report
from load_tests.measuring.command import EngineDtype, JsonFile, ModelFolder, Rounds, progress_bar
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.turns import alternated
from load_tests.micro.sparse_decode.sparse_port import SparsePort, Thinned

SEGMENT_TOKENS, BLOCK_TOKENS = 256, 32
SEGMENT_BLOCKS = SEGMENT_TOKENS // BLOCK_TOKENS
REST_TOKENS = 40
METHOD = "_build_attention_metadata"
BOUND = Bound(0.9)


class DecodingEngine(Engine):
    """An engine that answers one prompt, whose prefix it has dense and sparse. Use on one event loop."""

    def __init__(self, model: str, dtype: str, tokens: int, decoded: int) -> None:
        engine = {"device_blocks": 4 * tokens // BLOCK_TOKENS, "max_num_seqs": 8, "block_size_tokens": BLOCK_TOKENS}
        kv = {"segment_tokens": SEGMENT_TOKENS, "layerwise": {"enabled": "off"}}
        super().__init__(load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv}), MemoryPort())
        self.port = SparsePort(self.reuse.copier.layout)
        if (why := self.reuse.accept_sparse(self.port.open_kept)) is not None:
            raise RuntimeError(f"the engine presents no sparse prefix: {why}")
        self._segments = tokens // SEGMENT_TOKENS
        self._tokens = prompt(1, self._segments * SEGMENT_TOKENS + REST_TOKENS)
        self._decoded = decoded
        self.thinned: Thinned

    async def prepare(self) -> None:
        """Compute the prompt, store it, and make its prefix sparse."""
        await self.serve([self._tokens], 1)
        await asyncio.to_thread(self.wait_for_saves)
        layers = len(self.reuse.copier.layers)
        kept = [[SEGMENT_BLOCKS // 2] * layers] * self._segments
        self.thinned = self.port.thin(self.hashes(self._tokens), kept)

    async def decode(self, answers: int, sparse: bool) -> float:
        """Milliseconds per output token of so many answers at once."""
        found = await timed([self._stream(sparse) for _ in range(answers)], self._decoded)
        if self.port.sparse_fetches > 1 or found.usage["recomputed"] > REST_TOKENS:
            raise RuntimeError(f"the prefix was not on the device: {found.usage}")
        return 1e3 * found.tpot_s

    async def decode_unwrapped(self, answers: int) -> float:
        """The same, dense, with vLLM's own method."""
        runner = self.thread.runner
        wrapped = runner.__dict__.pop(METHOD)
        try:
            return await self.decode(answers, sparse=False)
        finally:
            setattr(runner, METHOD, wrapped)

    def _stream(self, sparse: bool) -> AsyncIterator[RequestOutput]:
        params: SamplingParams = greedy(self._decoded, output_kind=RequestOutputKind.DELTA)
        if not sparse:
            return self.generate(self._tokens, params)
        params.extra_args = {"kv_transfer_params": self.thinned.transfer(self.salt)}
        request: Any = {
            "type": "token", "prompt_token_ids": self._tokens, "cache_salt": self.thinned.salt(self.salt),
        }  # fmt: skip
        return self.llm.generate(request, params, f"sparse-{next(self._ids)}")


async def measure(engine: DecodingEngine, answers: int, rounds: int, title: str) -> Comparison:
    """All arms in turns."""
    await engine.prepare()
    await timed([engine._stream(True)], 1)  # the sparse prefix is on the device from now on, and the wrapper in place
    arms = {
        "dense": partial(engine.decode, answers, False),
        "half of the KV": partial(engine.decode, answers, True),
        "dense, vLLM's own method": partial(engine.decode_unwrapped, answers),
        "dense, again": partial(engine.decode, answers, False),
    }
    with progress_bar() as progress:
        bar = progress.add_task(title, total=(rounds + 1) * len(arms))
        values = await alternated(arms, rounds, advance=lambda: progress.advance(bar))
    return Comparison(title, "ms", "dense", values, ("half of the KV",), BOUND)


@contextlib.contextmanager
def opened(model: str | None, dtype: str, tokens: int, decoded: int) -> Iterator[DecodingEngine]:
    """The engine, and its end."""
    with tempfile.TemporaryDirectory() as name:
        engine = DecodingEngine(model or write_random_model(Path(name) / "random-qwen2"), dtype, tokens, decoded)
        try:
            yield engine
        finally:
            engine.close()


def main(
    rounds: Rounds = 8,
    tokens: Annotated[int, typer.Option(min=SEGMENT_TOKENS, help="Of the prefix; whole segments are used.")] = 4000,
    answers: Annotated[int, typer.Option(min=1, max=8, help="At once.")] = 1,
    decoded: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 48,
    model: ModelFolder = None,
    dtype: EngineDtype = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure, and print a Markdown table and what was missed."""
    with opened(model, dtype, tokens, decoded) as engine:
        found = asyncio.run(measure(engine, answers, rounds, f"TPOT, {tokens} tokens, {answers} at once"))
    lines = [f"{rounds} rounds; min / median / max; ratios are of one round.", "", report.table(COLUMNS, found.lines())]
    text = "\n".join([*lines, "", *(found.misses() or ["The target is reached."])])
    report.deliver(text, {"model": model or "45m", "rounds": rounds, "tpot": found.as_dict()}, json_file)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.sparse_decode")
    typer.run(main)
