"""One turn of the demo: a question to one replica, and what is wrong with its answer and with where its KV came from.

A turn computes the KV of its prompt and of its answer but for the last token, which the model has not read yet. Whole
blocks of that are found again, and never a prompt's last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from app.cli.demo.documents import Question
from app.cli.failures import NOT_SO, CommandError
from app.cli.server import ServerClient

PIN_HEADER: Final = "X-CrossKV-Replica"
DEMO_MODEL: Final = "demo"
"""The name that models/demo is served by: of other models no answer is known."""
SOURCES: Final = {"device": "device", "cpu": "CPU tier", "redis": "Redis", "recomputed": "computed"}
"""What the usage calls where a prompt's KV came from, and the words for it."""
COMPUTED_SOONER: Final = "computing was faster just now: the server has measured it, and did not load all"
NOT_REPEATED: Final = "this chat template does not repeat the answer token by token, so that nothing is known"
WAIT_S: Final = 30.0
"""KV is saved, copied to Redis and cleared in the background; a turn waits at most this time for it."""

_SOONER = ("recompute_faster", "partial")
"""What a plan says then; a load that fails stays a problem."""
_MOST_ANSWER_TOKENS, _LEAST_ANSWER_TOKENS = 96, 40
"""The least is for models that might answer in fewer: an answer must fill a block to be found again."""
_POLL_S = 0.05

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One step of the demo. `passed`: None where the step was left out, for the reason in `notes`.

    `tokens`: of the prompt, by `SOURCES`; empty where none was sent. `to_reuse`: how many of them had to come from one
    tier; None where that is not known. `ttft_s`: from sending to the first piece of text, in seconds.
    """

    scene: str
    passed: bool | None
    question: str = ""
    replica: str = ""
    ttft_s: float = 0.0
    tokens: dict[str, int] | None = None
    to_reuse: int | None = None
    answer: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """A chat that was answered: its row, and its tokens."""

    row: DemoRow
    text: str
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def computed(self) -> list[int]:
        """The tokens whose KV the replica has now."""
        return [*self.prompt_ids, *self.answer_ids[:-1]]


class DemoServer:
    """A running server. All that is sent through one object has one `cache_salt`, so KV of its own."""

    def __init__(self, client: ServerClient, salt: str) -> None:
        """Raises CommandError for a server that is not ready, or whose parts this key may not see."""
        self._client, self._salt = client, salt
        report = client.health()
        if "parts" not in report and report["status"] == "ok":
            raise CommandError("The server shows its parts to administrators only: give a key with `admin: true`.")
        self.parts: dict[str, dict[str, Any]] = report.get("parts", {})
        self.ailing = [f"{name}: {part['state']}" for name, part in self.parts.items() if part["state"] != "ok"]
        self.replicas = [int(rank) for rank in self.parts.get("replicas", {}).get("running", [])]
        if not self.replicas:
            why = f" ({', '.join(self.ailing)})" if self.ailing else ""
            raise CommandError(f"The server at {client.url} is not ready{why}; try again later.")
        self.model = str(client.get("/v1/models")["data"][0]["id"])
        self.block_tokens = int(self._lookup([0])["block_size_tokens"])

    @property
    def is_demo_model(self) -> bool:
        """Whether right answers are known."""
        return self.model == DEMO_MODEL

    def ask(
        self, scene: str, question: Question, chat: list[Message], replica: int, source: str, known: Sequence[int] = ()
    ) -> DemoTurn:
        """Send a chat to one replica, greedily, and check it. Raises CommandError where it is refused or breaks off.

        Args:
            scene: What the turn shows.
            question: The chat's last one.
            chat: All messages.
            replica: Its rank.
            source: Of `SOURCES`, the tier that must bring all that is known.
            known: Tokens that the server has computed; what the prompt shares with them is reused. Empty: nothing.
        """
        body = {
            "model": self.model, "messages": chat, "temperature": 0, "max_tokens": _MOST_ANSWER_TOKENS,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
            "cache_salt": self._salt, **({} if self.is_demo_model else {"min_tokens": _LEAST_ANSWER_TOKENS}),
        }  # fmt: skip
        text, first = "", 0.0
        usage: dict[str, Any] = {}
        prompt: list[int] = []
        answer: list[int] = []
        started = time.monotonic()
        for event in self._client.stream("/v1/chat/completions", body, {PIN_HEADER: str(replica)}):
            usage = event.get("usage") or usage
            prompt = event.get("prompt_token_ids") or prompt
            for choice in event["choices"]:
                answer += choice.get("token_ids") or []
                piece = choice["delta"].get("content") or ""
                first = first or (time.monotonic() if piece else 0.0)
                text += piece
        if "kv_cache" not in usage or not prompt:
            raise CommandError(f"The server at {self._client.url} does not say where KV came from: is it crosskv?")
        kv = usage["kv_cache"]
        tokens = {name: int(kv[name]) for name in SOURCES}
        to_reuse = self._to_reuse(prompt, known, source)
        problems, notes = self._wrong(tokens, to_reuse, source, str(kv.get("reason") or ""))
        if usage["prompt_tokens_details"]["cached_tokens"] != len(prompt) - tokens["recomputed"]:
            problems.append(f"usage.prompt_tokens_details says {usage['prompt_tokens_details']}")
        if str(kv["replica"]) != str(replica):
            problems.append(f"replica {replica} was asked for")
        if self.is_demo_model and (wrong := question.problem(text)):
            problems.append(wrong)
        row = DemoRow(
            scene, not problems, question.text, str(kv["replica"]), (first or time.monotonic()) - started, tokens,
            to_reuse, text.strip(), tuple(notes), tuple(problems),
        )  # fmt: skip
        return DemoTurn(row, text, prompt, answer)

    def clear(self, *tiers: str) -> None:
        """Empty these tiers (`device`, `cpu`) on all replicas and nodes. Raises CommandError."""
        self._client.post("/api/v1/kv/clear", {"tiers": tiers})

    def wait_for(self, tier: str, tokens: Sequence[int]) -> None:
        """Wait until a shared tier has every whole block of `tokens`. Raises CommandError when it has not in time."""
        blocks = len(tokens) // self.block_tokens
        self._wait(lambda: int(self._lookup(tokens)[tier]) >= blocks, f"{SOURCES[tier]} has not got all that was sent")

    def wait_until_empty(self, tier: str, tokens: Sequence[int]) -> None:
        """Wait until a shared tier has no block that `tokens` begin with. Raises CommandError when it has one still."""
        self._wait(lambda: int(self._lookup(tokens)[tier]) == 0, f"{SOURCES[tier]} was cleared, and is not empty")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                raise CommandError(f"{otherwise} after {WAIT_S:.0f} s.", NOT_SO)
            time.sleep(_POLL_S)

    def _lookup(self, tokens: Sequence[int]) -> dict[str, Any]:
        query = {"tokens": ",".join(map(str, tokens)), "cache_salt": self._salt}
        return self._client.get("/api/v1/kv/lookup", query)

    def _to_reuse(self, prompt: Sequence[int], known: Sequence[int], source: str) -> int | None:
        pairs = enumerate(zip(prompt, known, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(known)))
        if source != "device" and shared < len(known):
            return None  # shared tiers give whole segments, which end where a prompt and its answer do
        return min(shared, len(prompt) - 1) // self.block_tokens * self.block_tokens

    def _wrong(
        self, tokens: dict[str, int], to_reuse: int | None, source: str, reason: str
    ) -> tuple[list[str], list[str]]:
        """What is wrong with where the KV came from, and what is to be said of it."""
        if to_reuse is None:
            return [], [NOT_REPEATED]
        computed = sum(tokens.values()) - to_reuse
        if tokens["recomputed"] > computed and reason in _SOONER:
            return [], [COMPUTED_SOONER]
        wanted = {**dict.fromkeys(SOURCES, 0), source: to_reuse, "recomputed": computed}
        if tokens != wanted:
            return [f"it should be {to_reuse} {SOURCES[source]}, {computed} computed"], []
        return [], []
