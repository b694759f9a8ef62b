"""Locust's users: each holds conversations, reads the streams, and reports TTFT and TPOT as rows of their own."""

from __future__ import annotations

import random
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import httpx
from locust import User, task
from locust.exception import StopUser

from load_tests.locust.answer import Answer, AnswerError, TurnedAwayError, ask
from load_tests.locust.server import Served, authorization
from load_tests.locust.summary import Record, Sample
from load_tests.workloads.words import Words

SYSTEM_TOKENS, QUESTION_TOKENS = 400, 40
DOCUMENT_TOKENS, DOCUMENTS = 2000, 8
COLD_TOKENS = 1000
TEMPLATE_TOKENS = 16
"""More than a chat template adds to a message."""
PAUSE_AFTER_FAILURE_S = 1.0
"""At least: a server that refuses at once must not be asked in a busy loop."""
REQUEST_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
TLS = ssl.create_default_context()
"""One for all users: each takes tens of milliseconds to make."""

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Target:
    """The server, how users behave towards it, and where they report. `think_s` is the mean pause between turns."""

    served: Served
    tokens_per_character: float
    api_key: str | None
    think_s: float
    answer_tokens: int
    seed: int
    record: Record
    numbers: Iterator[int]

    def words(self) -> Words:
        """Return a maker of texts with about a wanted number of the server's tokens."""
        return Words(lambda text: round(len(text) * self.tokens_per_character))

    def at_most(self, tokens: int, share: float) -> int:
        """`tokens`, or less where the model's context is small."""
        return max(1, min(tokens, int(share * self.served.context_tokens)))


class Conversing(User):
    """Asks, waits for the whole answer, thinks, and asks again with all that was said; then starts over.

    One task run is one turn, so that Locust, when it stops users, lets the turn under way end (`--stop-timeout`).
    """

    abstract = True
    kind: ClassVar[str]
    turns: ClassVar[int]
    """Questions in a conversation, unless the context is full before."""
    target: ClassVar[Target | None] = None
    """Set before users start."""

    def on_start(self) -> None:
        """Connect."""
        if self.target is None:
            raise StopUser
        self.load = self.target
        self.rng = random.Random(f"{self.load.seed}/{self.kind}/{next(self.load.numbers)}")
        self.words = self.load.words()
        self.client = httpx.Client(
            base_url=self.load.served.url,
            headers=authorization(self.load.api_key),
            timeout=REQUEST_TIMEOUT,
            verify=TLS,
        )
        self.pause_s: float | None = None
        self.begin()

    def on_stop(self) -> None:
        """Disconnect."""
        if self.target is not None:
            self.client.close()

    def wait_time(self) -> float:
        """Seconds until the next turn: what the server asked for, else time to think."""
        pause, self.pause_s = self.pause_s, None
        if pause is not None:
            return pause
        return self.rng.expovariate(1 / self.load.think_s) if self.load.think_s else 0.0

    def begin(self) -> None:
        """A new conversation, with its first question."""
        self.turn_number = 0
        self.messages = self.opening()
        self.tokens = sum(self.estimate(message["content"]) for message in self.messages)
        self.put_question()

    def opening(self) -> Chat:
        """What stands before the first question."""
        return []

    def question(self) -> str:
        """What the user says next."""
        return self.words(self.rng, self.load.at_most(QUESTION_TOKENS, 0.1))

    def put_question(self) -> None:
        """Append it."""
        question = self.question()
        self.messages.append({"role": "user", "content": question})
        self.tokens += self.estimate(question)

    def estimate(self, text: str) -> int:
        """Tokens that a message of this text adds, about."""
        return round(len(text) * self.load.tokens_per_character) + TEMPLATE_TOKENS

    @task
    def turn(self) -> None:
        """Send the conversation, and append the answer and the next question."""
        returning = self.turn_number > 0
        answer_tokens = self.load.at_most(self.load.answer_tokens, 0.25)
        try:
            answer = ask(self.client, self.load.served.model, self.messages, answer_tokens)
        except TurnedAwayError as refusal:  # the same turn again, when the server said
            self.pause_s = refusal.retry_after_s
            self.load.record.samples.append(Sample(self.kind, returning, turned_away=True))
            self._row("429", self.kind)
            return
        except AnswerError as error:
            self.pause_s = max(PAUSE_AFTER_FAILURE_S, error.retry_after_s or 0.0)
            self.load.record.samples.append(Sample(self.kind, returning, error=str(error)))
            self._row("POST", self.kind, error=error)
            self.begin()
            return
        self._report(answer, returning)
        self.turn_number += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        known = None if answer.prompt_tokens is None else answer.prompt_tokens + answer.output_tokens
        self.tokens = known or self.tokens + answer.output_tokens
        self.put_question()
        full = self.tokens + answer_tokens > self.load.served.context_tokens
        # Some servers refuse a message without text, so an empty answer cannot stand in a history.
        if self.turn_number == self.turns or full or not answer.text:
            self.begin()

    def _report(self, answer: Answer, returning: bool) -> None:
        self.load.record.samples.append(
            Sample(
                self.kind,
                returning,
                ttft_s=answer.ttft_s,
                tpot_s=answer.tpot_s,
                output_tokens=answer.output_tokens,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
            )
        )
        self._row("POST", self.kind, answer.seconds, answer.received_bytes)
        if answer.ttft_s is not None:
            self._row("TTFT", f"{self.kind}, {'returning' if returning else 'first'}", answer.ttft_s)
        if answer.tpot_s is not None:
            self._row("TPOT", self.kind, answer.tpot_s)

    def _row(
        self, request_type: str, name: str, seconds: float = 0.0, length: int = 0, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=request_type,
            name=name,
            response_time=1e3 * seconds,
            response_length=length,
            exception=error,
            context={},
        )


class ChatUser(Conversing):
    """Short questions under a system prompt that all chats share; the answers make the history long."""

    kind, turns = "chat", 6

    def opening(self) -> Chat:
        """The system prompt."""
        rng = random.Random(f"{self.load.seed}/system")
        return [{"role": "system", "content": self.words(rng, self.load.at_most(SYSTEM_TOKENS, 0.2))}]


class DocumentUser(Conversing):
    """Some questions about one of a few long documents, which others ask about too."""

    kind, turns = "documents", 4

    def opening(self) -> Chat:
        """The document."""
        rng = random.Random(f"{self.load.seed}/document/{self.rng.randrange(DOCUMENTS)}")
        return [{"role": "system", "content": self.words(rng, self.load.at_most(DOCUMENT_TOKENS, 0.5))}]


class ColdUser(Conversing):
    """Long prompts, each sent only once: no cache can help."""

    kind, turns = "cold", 1

    def question(self) -> str:
        """The whole prompt."""
        return self.words(self.rng, self.load.at_most(COLD_TOKENS, 0.5))
