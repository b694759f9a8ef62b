"""What a blended prompt brings: whose ratio, and that a request's texts are tokenized once for all its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ingress_server import FINGERPRINT, SECRET, settings_with
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.sampling_params import SamplingParams

from app.extensions.blend.recognition import Separators
from app.extensions.blend.requests import BlendRequests, blend_requests, may_blend
from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from app.gate.prompt_extra import FrontParts
from app.metrics.ingress import IngressMetrics
from app.openai.prompt_keys import PromptKeys

DOCUMENT = "Anna lives in Oslo and Ben in Lima. " * 20
KEYS = PromptKeys(SECRET, FINGERPRINT, 32)


@pytest.fixture(scope="module")
def renderer(vllm_config: VllmConfig) -> Iterator[BaseRenderer]:
    made = renderer_from_config(vllm_config)
    yield made
    made.shutdown()


def made(encode: Any = None, keys: PromptKeys = KEYS) -> BlendRequests:
    separators = Separators([[6]], [2, 6])
    return BlendRequests(separators, encode, keys, lambda how, number: None)


def test_no_chunk_is_shorter_than_a_block() -> None:
    prompt = [1, 6, *range(100, 190), 2, 6, *range(200, 340), 2]
    blends = made(keys=PromptKeys(SECRET, FINGERPRINT, 128))
    assert blends.min_tokens == 128
    assert [chunk.tokens for chunk in blends.chunks(prompt, None)] == [141]


def test_no_chunk_is_shorter_than_64_tokens() -> None:
    prompt = [1, 6, *range(100, 150), 2, 6, *range(200, 270), 2]
    blends = made()
    assert blends.min_tokens == 64
    assert [chunk.tokens for chunk in blends.chunks(prompt, None)] == [71]


def test_the_texts_of_a_request_are_tokenized_once_for_all_its_prompts() -> None:
    calls: list[Sequence[str]] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        calls.append(texts)
        return [list(range(100, 200)) for _ in texts]

    async def ask() -> None:
        blends = made(encode=encode)
        context: Any = SimpleNamespace(kv_cache=KVCacheField(chunks=("a", "b")), extras={})
        gone = asyncio.ensure_future(blends.texts(context))
        await asyncio.sleep(0)
        gone.cancel()  # one prompt's client does not wait; the others do
        first, second = await asyncio.gather(blends.texts(context), blends.texts(context))

        assert first is second is not None
        assert await blends.texts(SimpleNamespace(kv_cache=SAYS_NOTHING, extras={})) is None  # type: ignore[arg-type]

    asyncio.run(ask())
    assert calls == [("a", "b")]


def test_texts_are_tokenized_as_the_model_does_whatever_truncation_others_have_set(renderer: BaseRenderer) -> None:
    tokenizer: Any = renderer.tokenizer
    alone = list(tokenizer.encode(DOCUMENT, add_special_tokens=False))
    blends = blend_requests(
        settings_with().blending, FrontParts(KEYS, renderer, None, IngressMetrics(CollectorRegistry()))
    )
    tokenizer.backend_tokenizer.enable_truncation(5)
    try:
        texts = blends.tokenized([DOCUMENT])
    finally:
        tokenizer.backend_tokenizer.no_truncation()

    (chunk,) = blends.chunks([1, 3, *alone, 2], texts)
    assert (chunk.start, chunk.tokens) == (3, len(alone) - 2)


@pytest.mark.parametrize(
    ("params", "may"),
    [
        (SamplingParams(), True),
        (SamplingParams(prompt_logprobs=0), False),
        (SamplingParams(skip_reading_prefix_cache=True), False),
    ],
)
def test_a_prompt_that_reads_nothing_stored_is_not_blended(params: SamplingParams, may: bool) -> None:
    assert may_blend(params) is may
