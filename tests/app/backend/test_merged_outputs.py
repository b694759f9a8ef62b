"""What piles up while the reader is busy is read as one; order and content stay, and nothing is held back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from app.backend.replica_call import merged
from load_tests.harness.patience import patience

WORDS = ["one ", "two ", "three ", "four ", "five"]
USAGE = {"crosskv": {"device": 3}}


class Stream:
    """The outputs of one prompt, as a handle brings them: when they are sent."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    def send(self, *items: Any) -> None:
        for item in items:
            self._sent.put_nowait(item)

    async def read(self) -> AsyncIterator[RequestOutput]:
        try:
            while (item := await self._sent.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed = True


def deltas(words: Sequence[str] = WORDS, index: int = 0, last: bool = True) -> list[RequestOutput]:
    found = []
    for number, word in enumerate(words):
        ends = last and number == len(words) - 1
        completion = CompletionOutput(index, word, [number], None, None, finish_reason="stop" if ends else None)
        output = RequestOutput("r", None, [1, 2], None, [completion], finished=ends)
        output.kv_transfer_params = USAGE if ends else None
        found.append(output)
    return found


def text(outputs: Sequence[RequestOutput], index: int = 0) -> str:
    return "".join(each.text for output in outputs for each in output.outputs if each.index == index)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_to_a_reader_that_keeps_up_each_output_comes_alone_and_at_once() -> None:
    async def check() -> None:
        stream, wanted = Stream(), deltas()
        outputs = merged(stream.read())
        for output in wanted:
            stream.send(output)
            assert await asyncio.wait_for(anext(outputs), patience(120)) is output
        stream.send(None)
        assert [each async for each in outputs] == []
        assert stream.closed

    asyncio.run(check())


def test_what_came_while_the_reader_was_busy_is_one_output_and_the_first_is_alone() -> None:
    async def check() -> None:
        stream = Stream()
        stream.send(*deltas(), None)
        outputs = merged(stream.read())
        first = await anext(outputs)
        assert text([first]) == WORDS[0]
        rest = []
        async for output in outputs:
            rest.append(output)
            await settled()
        assert len(rest) == 1
        assert text([first, *rest]) == "".join(WORDS)
        assert [token for output in (first, *rest) for token in output.outputs[0].token_ids] == [0, 1, 2, 3, 4]
        assert rest[0].finished
        assert rest[0].outputs[0].finish_reason == "stop"
        assert rest[0].kv_transfer_params == USAGE

    asyncio.run(check())


def test_answers_of_one_prompt_stay_apart() -> None:
    async def check() -> None:
        stream = Stream()
        pairs = zip(deltas(index=0), deltas([word.upper() for word in WORDS], index=1), strict=True)
        stream.send(*(output for pair in pairs for output in pair), None)
        outputs = [output async for output in merged(stream.read())]
        assert text(outputs, 0) == "".join(WORDS)
        assert text(outputs, 1) == "".join(WORDS).upper()

    asyncio.run(check())


def test_a_second_answer_has_the_prompts_logprobs_although_it_begins_while_the_reader_is_busy() -> None:
    """With `echo` each choice's first event repeats the prompt, with its logprobs."""

    async def check() -> None:
        stream, of_prompt = Stream(), [None, {2: Logprob(-0.5)}]
        first, second = deltas(index=0), deltas(index=1)
        for answer in (first, second):
            answer[0].prompt_logprobs = of_prompt
        stream.send(first[0], first[1], second[0], *first[2:], *second[1:], None)
        outputs = merged(stream.read())
        assert (await anext(outputs)).prompt_logprobs == of_prompt
        await settled()
        both = await anext(outputs)
        assert {answer.index for answer in both.outputs} == {0, 1}
        assert both.prompt_logprobs == of_prompt

    asyncio.run(check())


def test_what_came_before_a_replica_died_is_read_before_the_error() -> None:
    async def check() -> None:
        stream = Stream()
        stream.send(*deltas(last=False), ConnectionError("the engine died"))
        outputs = merged(stream.read())
        seen = [await anext(outputs)]
        await settled()
        seen.append(await anext(outputs))
        with pytest.raises(ConnectionError, match="the engine died"):
            await anext(outputs)
        assert text(seen) == "".join(WORDS)

    asyncio.run(check())


def test_an_error_before_the_first_output_is_raised_as_it_is() -> None:
    async def check() -> None:
        stream = Stream()
        stream.send(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            await anext(merged(stream.read()))

    asyncio.run(check())


@pytest.mark.parametrize("read", [1, 2], ids=["after the first", "later"])
def test_a_reader_that_leaves_ends_the_reading(read: int) -> None:
    async def check() -> None:
        stream = Stream()
        stream.send(*deltas(last=False)[:read])
        outputs = merged(stream.read())
        for _ in range(read):
            await anext(outputs)
        await outputs.aclose()
        await settled()
        assert stream.closed or read == 1
        assert len(asyncio.all_tasks()) == 1, "nothing goes on reading"

    asyncio.run(check())


def test_a_prompt_without_any_output_has_none() -> None:
    async def check() -> None:
        stream = Stream()
        stream.send(None)
        assert [output async for output in merged(stream.read())] == []

    asyncio.run(check())
