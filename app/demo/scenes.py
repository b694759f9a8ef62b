"""The script: every way in which a prompt's KV is found again, one row each."""

from __future__ import annotations

from typing import Any

from app.demo.documents import DOCUMENTS, GREETING, HOME, JOB, OWNER, TWO_HOPS, Question
from app.demo.known_kv import KnownKV
from app.demo.report import Report, Row
from app.demo.server import Message, Server, Turn

SAVE_DEADLINE_S = 10.0
"""KV is saved in the background once it is computed; a turn that needs it in the CPU tier waits so long."""

MOST_ANSWER_TOKENS = 96
LEAST_ANSWER_TOKENS = 40
"""Asked of models that might answer in fewer: an answer must fill a block to be found again."""

SAMPLING = {"temperature": 1.0, "top_p": 0.95}
MOST_SAMPLES = 8
"""A model that is sure of its answer may say the same a few times."""

_UNSAVED = f"what was sent before is not whole in the CPU tier after {SAVE_DEADLINE_S:.0f} s"


class Scenes:
    """Plays the script against a server and reports every step.

    `is_demo_model` is False for a model that need not answer as the demo model does: answers are shown then, but only
    the reuse is checked.
    """

    def __init__(self, server: Server, report: Report, is_demo_model: bool) -> None:
        self._server = server
        self._report = report
        self._is_demo_model = is_demo_model
        self._known = KnownKV(server.block_size_tokens)
        self._unsaved: list[list[int]] = []
        self._here = server.replicas[0]
        self._others = server.replicas[1:]

    def play(self) -> None:
        """The whole script, in order: later scenes rely on what earlier ones left in the tiers."""
        self._one_prompt_in_every_tier()
        self._answer_in_turn_two()
        self._two_answers_to_one_request()

    def _one_prompt_in_every_tier(self) -> None:
        chat = _chat(HOME)
        self._turn("cold", HOME, chat, self._here)
        self._turn("again: device hit", HOME, chat, self._here)
        across = "another replica: CPU-tier hit"
        if self._others:
            self._saved_turn(across, HOME, chat, self._others[0])
        else:
            self._report.add(Row(across, notes=("skipped: this server runs one replica",), skipped=True))
        self._saved_turn("devices cleared: CPU-tier hit", HOME, chat, self._here, clear=True)

    def _answer_in_turn_two(self) -> None:
        chat = _chat(GREETING)
        turn = self._turn("same documents, a longer answer", GREETING, chat, self._here)
        self._continued("turn two: the answer is reused", TWO_HOPS, chat, turn)

    def _two_answers_to_one_request(self) -> None:
        chat = _chat(GREETING)
        first = self._turn("sampled answer A", GREETING, chat, self._here, seed=0, **SAMPLING)
        for seed in range(1, MOST_SAMPLES):
            self._report.doing(f"sampling until an answer differs: try {seed} of {MOST_SAMPLES - 1}")
            second = self._ask(chat, self._here, seed=seed, **SAMPLING)
            if second.text != first.text:
                break
            self._remember(self._here, second)
        same = second.text == first.text
        self._check(
            "sampled answer B, same request",
            GREETING,
            self._here,
            second,
            problems=[f"{MOST_SAMPLES} samples gave one and the same answer"] if same else [],
        )
        self._both_in_the_index(first, second)
        self._continued("turn two after answer A", JOB, chat, first)
        self._continued("turn two after answer B", OWNER, chat, second)

    def _both_in_the_index(self, first: Turn, second: Turn) -> None:
        """The index holds one request with both answers behind it."""
        self._report.doing("looking up both answers")
        problems = [] if self._all_saved() else [_UNSAVED]
        request = int(self._server.lookup(first.prompt_ids)["cpu"])
        found = [self._server.lookup([*turn.prompt_ids, *turn.answer_ids]) for turn in (first, second)]
        blocks = [int(each["cpu"]) for each in found]
        expected = [self._known.blocks(first.prompt_ids)] + [
            self._known.blocks(turn.prompt_ids, turn.answer_ids) for turn in (first, second)
        ]
        if [request, *blocks] != expected:
            problems.append(f"it should be {expected[0]}, {expected[1]} and {expected[2]} blocks")
        if self._is_demo_model and min(blocks) <= request:
            problems.append("an answer adds no block to its request")
        requests, answers = ([_keys(each, kind) for each in found] for kind in ("request", "answer"))
        if requests[0] != requests[1]:
            problems.append("the index knows two requests")
        if answers[0] == answers[1] and self._is_demo_model:
            problems.append("the index does not know two answers")
        note = f"CPU tier: {request} blocks of the request, {blocks[0]} with answer A, {blocks[1]} with answer B"
        self._report.add(Row("lookup: A and B under one request", notes=(note,), problems=tuple(problems)))

    def _continued(self, scene: str, question: Question, chat: list[Message], turn: Turn) -> None:
        """The next turn of a conversation, where no device has its last answer."""
        following = [*chat, {"role": "assistant", "content": turn.text}, {"role": "user", "content": question.text}]
        replica = self._others[0] if self._others else self._here
        self._saved_turn(scene, question, following, replica, clear=not self._others, before=turn)

    def _saved_turn(
        self,
        scene: str,
        question: Question,
        chat: list[Message],
        replica: int,
        *,
        clear: bool = False,
        before: Turn | None = None,
    ) -> None:
        """A turn that finds in the CPU tier what the turns so far have computed."""
        self._report.doing(f"{scene}: waiting until the CPU tier has everything")
        problems = [] if self._all_saved() else [_UNSAVED]
        if clear:
            self._server.clear_devices()
            self._known.clear_devices()
        self._report.doing(scene)
        turn = self._ask(chat, replica)
        self._check(scene, question, replica, turn, problems, before)

    def _turn(self, scene: str, question: Question, chat: list[Message], replica: int, **sampling: Any) -> Turn:
        self._report.doing(scene)
        turn = self._ask(chat, replica, **sampling)
        self._check(scene, question, replica, turn, [])
        return turn

    def _ask(self, chat: list[Message], replica: int, **sampling: Any) -> Turn:
        extra = {} if self._is_demo_model else {"extra_body": {"min_tokens": LEAST_ANSWER_TOKENS}}
        return self._server.ask(chat, replica, max_tokens=MOST_ANSWER_TOKENS, **sampling, **extra)

    def _check(
        self,
        scene: str,
        question: Question,
        replica: int,
        turn: Turn,
        problems: list[str],
        before: Turn | None = None,
    ) -> None:
        """Compare a turn with what it must be, show it, and remember what it computed."""
        expected = self._known.expected(replica, turn.prompt_ids)
        if turn.tokens != expected:
            problems.append(f"tokens by source should be {expected}")
        if turn.cached_tokens != turn.tokens.reused:
            problems.append(f"usage.prompt_tokens_details.cached_tokens says {turn.cached_tokens}")
        if turn.replica != str(replica):
            problems.append(f"replica {replica} was asked for")
        wrong = question.problem(turn.text) if self._is_demo_model else ""
        if wrong:
            problems.append(wrong)
        note = ""
        if before is not None:
            note = self._answer_reuse(before, turn)
            if not note and self._is_demo_model:
                problems.append("no block with tokens of the last answer was reused")
            elif not note:
                note = "the last answer is too short, or this chat template does not repeat it token by token"
        self._report.add(
            Row(
                scene=scene,
                question=question.text,
                replica=turn.replica,
                ttft_s=turn.ttft_s,
                tokens=turn.tokens,
                expected=expected,
                answer=turn.text.strip(),
                notes=(note,) if note else (),
                problems=tuple(problems),
            )
        )
        self._remember(replica, turn)

    def _answer_reuse(self, before: Turn, turn: Turn) -> str:
        """How much of the answer `before` was reused, in blocks that the index calls an answer's; empty: nothing."""
        answer_tokens = turn.tokens.reused - len(before.prompt_ids)
        ends = [
            segment["start"] + segment["num_blocks"]
            for segment in self._server.lookup(turn.prompt_ids)["segments"]
            if segment["kind"] == "answer" and "cpu" in segment["tiers"]
        ]
        if answer_tokens > 0 and any(end * self._known.block_size <= turn.tokens.reused for end in ends):
            return f"{answer_tokens} of the reused tokens are the last answer's"
        return ""

    def _remember(self, replica: int, turn: Turn) -> None:
        self._unsaved.append(self._known.add_turn(replica, turn.prompt_ids, turn.answer_ids))

    def _all_saved(self) -> bool:
        waiting, self._unsaved = self._unsaved, []
        return all(self._server.wait_until_saved(sequence, SAVE_DEADLINE_S) for sequence in waiting)


def _chat(question: Question) -> list[Message]:
    return [{"role": "system", "content": DOCUMENTS}, {"role": "user", "content": question.text}]


def _keys(found: dict[str, Any], kind: str) -> list[str]:
    return [segment["key"] for segment in found["segments"] if segment["kind"] == kind]
