"""Whatever parameters clients send together, in chunks and in a pool too small for all, the engine goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from live_engine import LiveEngine
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from load_tests.harness.engine import greedy, prompt

LENGTHS = [1, 31, 32, 33, 511, 512, 513, 1300]  # around a block (32) and a step (512)
EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-9, 1.0, 2.0],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "top_k": [1, 5, 2**31 - 1],
    "top_p": [1e-9, 0.9],
    "min_p": [0.5, 1.0],
    "repetition_penalty": [1e-9, 1e9],
    "presence_penalty": [-2.0, 2.0],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 3],
    "min_tokens": [1],
    "logit_bias": [{5: 100.0}, {2: -100.0, 7: 1e30}],
    "allowed_token_ids": [[2], [5, 5, 7]],
    "stop_token_ids": [[-1], [2**31], list(range(200))],
    "bad_words": [["a", "b"], ["\x00"]],
    "stop": [["a"], ["\x00"]],
    "n": [3],
    "structured_outputs": [{"regex": "a+b"}, {"json_object": True}, {"grammar": 'root ::= "a" root | "b"'}],
}
REQUESTS_AT_ONCE = 10


def drawn(draw: random.Random) -> SamplingParams | None:
    """A few extremes together; None where vLLM refuses them at once."""
    chosen = {name: draw.choice(EXTREMES[name]) for name in draw.sample(sorted(EXTREMES), 5)}
    try:
        if "structured_outputs" in chosen:
            chosen["structured_outputs"] = StructuredOutputsParams(**chosen["structured_outputs"])
        return SamplingParams(max_tokens=draw.choice([1, 3, 20]), **chosen)
    except VLLMValidationError:
        return None


@pytest.mark.parametrize("seed", [1, 2])
def test_no_parameters_end_the_engine(engine: LiveEngine, seed: int) -> None:
    draw = random.Random(seed)

    async def ask(tokens: list[int], params: SamplingParams) -> bool:
        try:
            await engine.answer(tokens, params, planned=False)
        except VLLMValidationError:
            return False
        return True

    async def crowd() -> tuple[list[bool], list[int]]:
        decoder = asyncio.ensure_future(engine.answer(prompt(0, 40), greedy(100), planned=False))
        params = [one for one in (drawn(draw) for _ in range(REQUESTS_AT_ONCE)) if one is not None]
        done = await asyncio.gather(*(ask(prompt(draw.randrange(4), draw.choice(LENGTHS)), one) for one in params))
        return done, list((await decoder).outputs[0].token_ids)

    undisturbed = list(engine.run(engine.answer(prompt(0, 40), greedy(100), planned=False)).outputs[0].token_ids)
    done, decoded = engine.run(crowd())

    assert engine.thread.error is None
    assert any(done), "some of the requests were taken"
    assert decoded == undisturbed
