"""What a replica sends of one prompt: alone while the reader keeps up, and together what came while it did not.

Each token comes as an object of its own. What piles up on the replica's side vLLM merges there. What piles up here,
while this process's loop is busy with others, is merged here, so that it is rendered and sent as one event: the more
there is to do, the fewer events a token takes. Nothing is held back for it, and the first output goes alone.

Leans on vLLM: `RequestOutput.add`, as its own engine client does for a slow reader. It drops the prompt's logprobs,
which come with each answer's first output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


async def merged(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """`outputs`, which are deltas, in order. What ends them is raised once all that came before it has been read.

    Close it to end the reading of `outputs`.
    """
    first = await anext(outputs, None)
    if first is None:
        return
    yield first
    waiting: RequestOutput | None = None
    end: BaseException | None = None
    changed = asyncio.Event()

    async def read() -> None:
        nonlocal waiting, end
        try:
            async for output in outputs:
                if waiting is None:
                    waiting = output
                else:
                    waiting.add(output, aggregate=True)
                    waiting.prompt_logprobs = waiting.prompt_logprobs or output.prompt_logprobs
                changed.set()
            end = StopAsyncIteration()
        except BaseException as error:
            end = error
        changed.set()

    reading = asyncio.ensure_future(read())
    try:
        while True:
            await changed.wait()
            if waiting is not None:
                output, waiting = waiting, None
                yield output
            elif end is None:
                changed.clear()
            elif isinstance(end, StopAsyncIteration):
                return
            else:
                raise end
    finally:
        reading.cancel()
