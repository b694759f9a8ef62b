"""Sends prompts: tiny ones, and documents whose KV is on the device, in the CPU tier and in Redis.

Their lengths are random, so that none ends where a block or a segment does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from load_tests.harness.answers import Answer, chat_request
from load_tests.harness.client import ServerError
from load_tests.harness.server import ServerProcess, local_http
from load_tests.measuring.processes import wait_until_quiet
from load_tests.waterfall.wire import Connection
from load_tests.workloads import Words

TINY, DEVICE, CPU, REDIS = "tiny", "device", "cpu", "redis"
CASES = (TINY, DEVICE, CPU, REDIS)
ASKED_HEADERS = {"X-CrossKV-Stages": "1"}
_PATH = "/v1/chat/completions"
TINY_TOKENS = (30, 60)
LONG_TOKENS = (1_700, 2_300)
QUESTION_TOKENS = (10, 120)
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """A system message, empty for none, and a question."""

    document: str
    question: str

    def body(self, model: str) -> dict[str, Any]:
        """Of a request for a streamed answer of exactly `ANSWER_TOKENS`."""
        messages = [{"role": "system", "content": self.document}] if self.document else []
        messages.append({"role": "user", "content": self.question})
        return chat_request(model, messages, ANSWER_TOKENS) | {"ignore_eos": True}


def tiny(rng: random.Random, text: Words, count: int) -> list[Asked]:
    """Prompts that no two of share a beginning worth anything."""
    return [Asked("", text(rng, rng.randint(*TINY_TOKENS))) for _ in range(count)]


def documents(rng: random.Random, text: Words, count: int) -> list[str]:
    """Texts that come back."""
    return [text(rng, rng.randint(*LONG_TOKENS)) for _ in range(count)]


def questions(rng: random.Random, text: Words, about: Sequence[str]) -> list[Asked]:
    """A new question about each."""
    return [Asked(document, text(rng, rng.randint(*QUESTION_TOKENS))) for document in about]


@dataclass
class Found:
    """Of one case at one concurrency: answers in the order of the prompts, and answers per second.

    `elsewhere` counts answers that are left out, because not most of their prompt came from where it should.
    """

    answers: list[Answer] = field(default_factory=list)
    busy_s: float = 0.0
    asked: int = 0
    elsewhere: int = 0

    @property
    def requests_per_s(self) -> float:
        """While requests were under way."""
        return self.asked / self.busy_s

    def stages_ms(self) -> list[dict[str, float]]:
        """Of each answer: crosskv's stages, and `proxy`, all that is neither in the ingress nor behind it."""
        rows = []
        for answer in self.answers:
            stages = dict(answer.kv_cache.get("stages_ms") or {})
            if stages:
                rows.append({"proxy": max(0.0, 1e3 * answer.first_text_s - sum(stages.values())), **stages})
        return rows


class Questions:
    """One server's, with a connection for each of the requests that are under way at once."""

    def __init__(self, server: ServerProcess, model: str, is_crosskv: bool) -> None:
        self._url, self._model, self._is_crosskv = server.url, model, is_crosskv
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._address = host, int(port)

    async def ask(self, asked: Sequence[Asked], concurrency: int, found: Found, tier: str | None) -> None:
        """Send all of them, `concurrency` at a time; closed loop."""
        waiting = list(enumerate(asked))[::-1]
        answers: dict[int, Answer] = {}

        async def worker() -> None:
            connection = Connection(*self._address)
            try:
                while waiting:
                    number, one = waiting.pop()
                    headers = ASKED_HEADERS if self._is_crosskv else {}
                    answers[number] = await connection.ask(_PATH, one.body(self._model), headers)
            finally:
                connection.close()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(asked))):
                tasks.create_task(worker())
        found.busy_s += time.perf_counter() - began
        found.asked += len(asked)
        for number in sorted(answers):
            if tier is None or _mostly_from(tier, answers[number]):
                found.answers.append(answers[number])
            else:
                found.elsewhere += 1

    def forget(self, *tiers: str) -> None:
        """Clear tiers; a device's blocks only go once no request uses them."""
        body = {"tiers": tiers}
        local_http().post(f"{self._url}/api/v1/kv/clear", json=body, timeout=30).raise_for_status()


def _mostly_from(tier: str, answer: Answer) -> bool:
    if not answer.kv_cache:  # another server: its prefix cache is the device's
        return tier == DEVICE
    return 2 * int(answer.kv_cache[tier]) > int(answer.usage["prompt_tokens"])


def measure(
    server: ServerProcess, model: str, text: Words, cases: Sequence[str], sizes: Mapping[str, Any], seed: str
) -> dict[tuple[str, int], Found]:
    """By case and concurrency. `sizes`: `concurrency`, a list; `requests` of tiny prompts, `batches` of the others.

    Equal seeds give equal prompts, whatever the server is.
    """
    is_crosskv = local_http().get(f"{server.url}/api/v1/kv/stats").status_code == 200
    client = Questions(server, model, is_crosskv)
    found: dict[tuple[str, int], Found] = {}
    for concurrency in sizes["concurrency"]:
        rng = random.Random(f"{seed}/{concurrency}")
        asyncio.run(client.ask(tiny(rng, text, 2 * concurrency + 4), concurrency, Found(), None))  # warms up
        if TINY in cases:
            one = found[TINY, concurrency] = Found()
            asyncio.run(client.ask(tiny(rng, text, sizes["requests"]), concurrency, one, None))
        texts = documents(rng, text, concurrency)
        if set(cases) - {TINY}:
            asyncio.run(client.ask(questions(rng, text, texts), concurrency, Found(), None))
        for case in (case for case in cases if case != TINY and (is_crosskv or case == DEVICE)):
            one = found[case, concurrency] = Found()
            if case == REDIS:
                wait_until_quiet(server.process)  # copies to lower tiers go on after the last answer
            for _ in range(sizes["batches"]):
                if case != DEVICE:
                    client.forget("device", *([CPU] if case == REDIS else []))
                asyncio.run(client.ask(questions(rng, text, texts), concurrency, one, case))
    return found


def require_answers(found: Mapping[tuple[str, int], Found], title: str) -> None:
    """Raises ServerError when a case has no answer from where its KV should come."""
    for (case, concurrency), one in found.items():
        if not one.answers:
            raise ServerError(f"{title}: none of {one.asked} prompts came from {case}, {concurrency} at a time.")
        with contextlib.suppress(KeyError):
            if any(answer.usage["completion_tokens"] != ANSWER_TOKENS for answer in one.answers):
                raise ServerError(f"{title}: an answer is not {ANSWER_TOKENS} tokens long.")
