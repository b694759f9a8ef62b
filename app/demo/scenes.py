"""The script: every way in which a prompt's KV is found again, one row each. What needs Redis is in `redis_scenes`."""

from __future__ import annotations

from typing import Any

from app.demo.documents import DOCUMENTS, GREETING, HOME, JOB, OWNER, TWO_HOPS, Question
from app.demo.report import ReportRow
from app.demo.server import DemoTurn, Message
from app.demo.stage import Asked, DemoRun

SAMPLING = {"temperature": 1.0, "top_p": 0.95}
MOST_SAMPLES = 8
"""A model that is sure of its answer may say the same a few times."""


class Scenes:
    """Plays the script on a stage. Later scenes rely on what earlier ones left in the tiers."""

    def __init__(self, stage: DemoRun) -> None:
        self._stage = stage

    def play(self) -> Asked:
        """The whole script, in order. Returns its last question, whose conversation holds an answer."""
        self._one_prompt_on_every_device()
        self._answer_in_turn_two()
        return self._two_answers_to_one_request()

    def _one_prompt_on_every_device(self) -> None:
        stage, chat = self._stage, _chat(HOME)
        stage.turn("cold", HOME, chat, stage.here)
        stage.turn("again: device hit", HOME, chat, stage.here)
        across = "another replica: CPU-tier hit"
        if stage.is_alone:
            stage.report.add(ReportRow(across, notes=("skipped: this server runs one replica",), skipped=True))
        else:
            stage.saved_turn(across, HOME, chat, stage.there)
        stage.saved_turn("devices cleared: CPU-tier hit", HOME, chat, stage.here, clear=True)

    def _answer_in_turn_two(self) -> None:
        chat = _chat(GREETING)
        turn = self._stage.turn("same documents, a longer answer", GREETING, chat, self._stage.here)
        self._continued("turn two: the answer is reused", TWO_HOPS, chat, turn)

    def _two_answers_to_one_request(self) -> Asked:
        stage, chat = self._stage, _chat(GREETING)
        first = stage.turn("sampled answer A", GREETING, chat, stage.here, seed=0, **SAMPLING)
        for seed in range(1, MOST_SAMPLES):
            stage.report.doing(f"sampling until an answer differs: try {seed} of {MOST_SAMPLES - 1}")
            second = stage.ask(chat, stage.here, seed=seed, **SAMPLING)
            if second.text != first.text:
                break
            stage.remember(stage.here, second)
        same = second.text == first.text
        stage.check(
            "sampled answer B, same request",
            GREETING,
            stage.here,
            second,
            problems=[f"{MOST_SAMPLES} samples gave one and the same answer"] if same else [],
        )
        self._both_in_the_index(first, second)
        self._continued("turn two after answer A", JOB, chat, first)
        return self._continued("turn two after answer B", OWNER, chat, second)

    def _both_in_the_index(self, first: DemoTurn, second: DemoTurn) -> None:
        """The index holds one request with both answers behind it."""
        stage = self._stage
        stage.report.doing("looking up both answers")
        problems = stage.wait_until_saved()
        request = int(stage.server.lookup(first.prompt_ids)["cpu"])
        found = [stage.server.lookup([*turn.prompt_ids, *turn.answer_ids]) for turn in (first, second)]
        blocks = [int(each["cpu"]) for each in found]
        expected = [stage.known.blocks(first.prompt_ids)] + [
            stage.known.blocks(turn.prompt_ids, turn.answer_ids) for turn in (first, second)
        ]
        if [request, *blocks] != expected:
            problems.append(f"it should be {expected[0]}, {expected[1]} and {expected[2]} blocks")
        if stage.is_demo_model and min(blocks) <= request:
            problems.append("an answer adds no block to its request")
        requests, answers = ([_keys(each, kind) for each in found] for kind in ("request", "answer"))
        if requests[0] != requests[1]:
            problems.append("the index knows two requests")
        if answers[0] == answers[1] and stage.is_demo_model:
            problems.append("the index does not know two answers")
        note = f"CPU tier: {request} blocks of the request, {blocks[0]} with answer A, {blocks[1]} with answer B"
        stage.report.add(ReportRow("lookup: A and B under one request", notes=(note,), problems=tuple(problems)))

    def _continued(self, scene: str, question: Question, chat: list[Message], before: DemoTurn) -> Asked:
        """The next turn of a conversation, where no device has its last answer."""
        stage = self._stage
        following = [*chat, {"role": "assistant", "content": before.text}, {"role": "user", "content": question.text}]
        turn = stage.saved_turn(scene, question, following, stage.there, clear=stage.is_alone, before=before)
        return Asked(question, following, turn)


def _chat(question: Question) -> list[Message]:
    return [{"role": "system", "content": DOCUMENTS}, {"role": "user", "content": question.text}]


def _keys(found: dict[str, Any], kind: str) -> list[str]:
    return [segment["key"] for segment in found["segments"] if segment["kind"] == kind]
