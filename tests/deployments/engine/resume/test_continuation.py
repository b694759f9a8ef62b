"""An answer that goes on in another engine is the undisturbed one: ids, text, logprobs, and how it ends (float32)."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from live_engine import LiveEngine, usage
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from deployments.protocol.wire import FIRST_USAGE
from load_tests.harness.engine import greedy, prompt
from tests import sizes

PROMPT = prompt(3, 150)
LONG = prompt(5, 700)
CUTS = (1, 7, 33)
"""Behind these tokens; `make test` cuts each kind at two of them, in turns."""
REGEX = r"([a-z]{3} [0-9]{2};){8}"


def sampled(max_tokens: int = 45, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


KINDS: dict[str, SamplingParams] = {
    "greedy": greedy(45),
    "logprobs": greedy(40, logprobs=2),
    "presence and frequency": greedy(45, presence_penalty=0.7, frequency_penalty=0.9),
    "penalties among few": greedy(
        45, logit_bias={20: 20.0, 30: 19.5, 40: 19.0}, frequency_penalty=2.0, presence_penalty=1.0
    ),
    "repetition": greedy(45, repetition_penalty=1.3),
    "seeded": sampled(temperature=1.0, seed=11),
    "seeded top-p top-k": sampled(temperature=0.8, seed=12, top_p=0.9, top_k=20),
    "seeded min-p": sampled(temperature=1.0, seed=13, min_p=0.02, logprobs=1),
    "min_tokens": SamplingParams(temperature=0, max_tokens=45, min_tokens=40),
    "structured": SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX)),
    "seeded structured": SamplingParams(
        temperature=1.0, seed=5, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX)
    ),
    "logit_bias": greedy(45, logit_bias={20: 3.0}),
    "bad_words": greedy(45, bad_words=["ball", " red"]),
}
"""Where an answer tells a continuation from a longer prompt, and where it does not."""


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [(kind, CUTS if sizes.LONG else (CUTS * 2)[number % 3 :][:2]) for number, kind in enumerate(KINDS)],
    ids=KINDS,
)
def test_cut_anywhere_it_is_the_undisturbed_answer(cutter: Any, kind: str, cuts: tuple[int, ...]) -> None:
    undisturbed = cutter.undisturbed(PROMPT, KINDS[kind])
    assert len(undisturbed.tokens) > CUTS[-1], "the answer is longer than every cut"
    for after in cuts:
        assert cutter.cut(PROMPT, KINDS[kind], after) == undisturbed, f"cut after {after}"
        cutter.forget()
    assert cutter.engine.thread.error is None


@pytest.mark.parametrize("included", [False, True], ids=["held back", "included"])
def test_a_stop_string_is_found_across_the_cut_and_no_character_comes_twice(cutter: Any, included: bool) -> None:
    text = cutter.whole(PROMPT, greedy(45)).text
    stop = text[60:66]
    params = greedy(45, stop=[stop], include_stop_str_in_output=included)
    undisturbed = cutter.whole(PROMPT, params)
    assert undisturbed.ended == ("stop", stop)
    assert len(undisturbed.tokens) > 3
    length = len(undisturbed.tokens)
    for after in range(1, length, 3) if sizes.LONG else (1, *range(max(2, length - 4), length)):
        assert cutter.cut(PROMPT, params, after) == undisturbed, f"cut after {after}"
        cutter.forget()


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        # Each place with two kinds or more, and each kind with two places.
        ("greedy", "device"),
        ("greedy", "tiers"),
        ("seeded", "tiers"),
        ("seeded", "nothing"),
        ("presence and frequency", "device"),
        ("presence and frequency", "nothing"),
        ("structured", "device"),
        ("structured", "tiers"),
        *(
            pytest.param(
                *pair,
                marks=pytest.mark.long(
                    "tests/deployments/engine/resume/test_continuation.py"
                    "::test_its_kv_may_come_from_the_device_the_tiers_or_nowhere"
                ),
            )
            for pair in [
                ("greedy", "nothing"),
                ("seeded", "device"),
                ("presence and frequency", "tiers"),
                ("structured", "nothing"),
            ]
        ),
    ],
)
def test_its_kv_may_come_from_the_device_the_tiers_or_nowhere(cutter: Any, kind: str, keep: str) -> None:
    undisturbed = cutter.undisturbed(LONG, KINDS[kind])
    for after in (5, 33):
        assert cutter.cut(LONG, KINDS[kind], after, keep) == undisturbed, f"cut after {after}"
        counted = usage(cutter.last)
        assert min(counted.values()) >= 0
        assert sum(counted.values()) == len(LONG) + cutter.entered, "of what it entered with"
        assert (counted["device"] > 0) is (keep == "device")
        assert (counted["cpu"] > 0) is (keep == "tiers")
        cutter.forget()


@pytest.mark.parametrize("kind", ["penalties among few", "seeded", "structured"])
def test_as_a_longer_prompt_it_would_be_wrong(cutter: Any, kind: str) -> None:
    """So the test of cuts can tell."""
    undisturbed = cutter.undisturbed(PROMPT, KINDS[kind])
    for after in (12, 33):  # the grammar repeats itself every 7
        assert cutter.naive(PROMPT, KINDS[kind], after).tokens != undisturbed.tokens
        cutter.forget()


def test_the_first_output_says_where_the_prompt_came_from_and_so_does_the_last(engine: LiveEngine) -> None:
    async def outputs() -> list[Any]:
        return [output async for output in engine.stream(LONG, greedy(60))]  # a slow reader gets several in one

    first, *_, last = engine.run(outputs())
    told = getattr(first, FIRST_USAGE)
    assert not first.finished
    assert {tier: told[tier] for tier in ("device", "cpu", "redis", "recomputed")} == usage(last)
    assert not hasattr(last, FIRST_USAGE)


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_an_answer_that_a_stop_string_ends_says_where_its_prompt_came_from(
    engine: LiveEngine, kind: RequestOutputKind
) -> None:
    def answer(**options: Any) -> Any:
        engine.settle()
        engine.clear_device()
        return engine.run(engine.answer(LONG, greedy(40, output_kind=kind, **options)))

    answer()  # so its KV lies in the tiers
    text = engine.run(engine.answer(LONG, greedy(40))).outputs[0].text
    plain = answer()
    assert usage(plain)["cpu"] > 0
    stop = text[-40:-30]  # the text of a prompt that ends within a character comes before its answer's
    assert text.index(stop) == len(text) - 40
    stopped = answer(stop=[stop])
    assert (stopped.outputs[0].finish_reason, stopped.finished) == ("stop", True)
    assert usage(stopped) == usage(plain)


def test_one_that_is_aborted_before_its_first_step_leaves_nothing_behind(cutter: Any, engine: LiveEngine) -> None:
    said = cutter.whole(PROMPT, greedy(10)).tokens[:5]
    core: Any = engine.thread.core
    runner = engine.thread.runner

    async def enter_and_leave() -> None:
        params = greedy(45, extra_args={"crosskv_resumed_tokens": said})
        stream = engine.generate(PROMPT, params)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    engine.run(enter_and_leave())
    engine.settle()
    cutter.whole(PROMPT, greedy(2))
    assert engine.on_engine_thread(lambda: list(runner.requests)) == []
    assert core.scheduler.requests == {}


@pytest.mark.parametrize("tokens", [10, 11], ids=["as long as it may be", "longer"])
def test_an_answer_that_has_ended_is_refused_by_the_engine_which_lives_on(
    cutter: Any, engine: LiveEngine, tokens: int
) -> None:
    params = greedy(10, extra_args={"crosskv_resumed_tokens": [20] * tokens})
    output = engine.run(engine.answer(PROMPT, params, planned=False))
    assert output.outputs[0].finish_reason == "error"
    assert len(cutter.whole(PROMPT, greedy(3)).tokens) == 3


def test_tokens_that_the_grammar_does_not_allow_end_in_an_error(cutter: Any, engine: LiveEngine) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{30}"),
        extra_args={"crosskv_resumed_tokens": cutter.whole(PROMPT, KINDS["structured"]).tokens[:4]},
    )
    output = engine.run(engine.answer(PROMPT, params, planned=False))
    assert output.outputs[0].finish_reason == "error"
    assert len(cutter.whole(PROMPT, greedy(3)).tokens) == 3


def test_several_at_once_go_on_beside_others(cutter: Any, engine: LiveEngine) -> None:
    """Continued requests are prefilled in steps in which others decode, greedy and seeded."""
    prompts = [prompt(seed, 200 + 60 * seed) for seed in range(4)]
    kinds = [KINDS["greedy"], KINDS["seeded"], KINDS["presence and frequency"], KINDS["seeded top-p top-k"]]
    undisturbed = [cutter.undisturbed(*each) for each in zip(prompts, kinds, strict=True)]

    async def together() -> list[Any]:
        async def one(tokens: list[int], params: SamplingParams, whole: Any) -> list[int]:
            options = copy.deepcopy(params)
            options.extra_args = {"crosskv_resumed_tokens": whole.tokens[:20]}
            output = await engine.answer(tokens, options, planned=False)
            return list(output.outputs[0].token_ids)

        return await asyncio.gather(*(one(*each) for each in zip(prompts, kinds, undisturbed, strict=True)))

    assert engine.run(together()) == [whole.tokens for whole in undisturbed]
