"""What every scene is made of: a question asked on one replica, compared with what must come of it, and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.demo.documents import Question
from app.demo.known_kv import KnownKV
from app.demo.report import Report, ReportRow
from app.demo.server import DemoServer, DemoTurn, Message

SAVE_DEADLINE_S = 10.0
"""KV is saved in the background once it is computed; a turn that needs it in the CPU tier waits at most this time."""

MOST_ANSWER_TOKENS = 96
LEAST_ANSWER_TOKENS = 40
"""Asked of models that might answer in fewer: an answer must fill a block to be found again."""

COMPUTED_SOONER = "computing was faster just now: the server has measured it, and did not load all"
_SOONER = ("recompute_faster", "partial")
"""What the manager's plan says then; a load that fails stays a problem."""
_NO_ANSWER_REUSED = "the last answer is too short, or this chat template does not repeat it token by token"


@dataclass(frozen=True)
class Asked:
    """A question at the end of its conversation, and the turn that it became."""

    question: Question
    chat: list[Message]
    turn: DemoTurn


class DemoRun:
    """Asks, checks, shows, and remembers in `known` what the server must have since.

    `is_demo_model` is False for a model that need not answer as the demo model does: answers are shown then, but only
    the reuse is checked. `here` is the replica that most is asked of, `there` another, or the same where it is alone.
    """

    def __init__(self, server: DemoServer, report: Report, is_demo_model: bool) -> None:
        self.server = server
        self.report = report
        self.is_demo_model = is_demo_model
        self.known = KnownKV(server.block_size_tokens)
        self.here = server.replicas[0]
        self.there = server.replicas[:2][-1]
        self._unsaved: list[list[int]] = []

    @property
    def is_alone(self) -> bool:
        """Whether the server runs one replica."""
        return self.here == self.there

    def turn(self, scene: str, question: Question, chat: list[Message], replica: int, **sampling: Any) -> DemoTurn:
        """Ask, check and show."""
        self.report.doing(scene)
        turn = self.ask(chat, replica, **sampling)
        self.check(scene, question, replica, turn)
        return turn

    def saved_turn(
        self,
        scene: str,
        question: Question,
        chat: list[Message],
        replica: int,
        *,
        clear: bool = False,
        before: DemoTurn | None = None,
    ) -> DemoTurn:
        """A turn that finds in the CPU tier what the turns so far have computed; `clear` empties the devices first."""
        self.report.doing(f"{scene}: waiting until the CPU tier has everything")
        problems = self.wait_until_saved()
        if clear:
            self.clear("device")
        self.report.doing(scene)
        turn = self.ask(chat, replica)
        self.check(scene, question, replica, turn, problems, before)
        return turn

    def ask(self, chat: list[Message], replica: int, **sampling: Any) -> DemoTurn:
        """Ask only: `check` or `remember` must follow."""
        extra = {} if self.is_demo_model else {"extra_body": {"min_tokens": LEAST_ANSWER_TOKENS}}
        return self.server.ask(chat, replica, max_tokens=MOST_ANSWER_TOKENS, **sampling, **extra)

    def check(
        self,
        scene: str,
        question: Question,
        replica: int,
        turn: DemoTurn,
        problems: Sequence[str] = (),
        before: DemoTurn | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Compare a turn with what it must be, show it, and remember what it computed."""
        problems, notes = list(problems), list(notes)
        expected = self.known.expected(replica, turn.prompt_ids)
        sooner = turn.reason in _SOONER and turn.tokens.reused < expected.reused
        if sooner:
            notes.append(COMPUTED_SOONER)
        elif turn.tokens != expected:
            problems.append(f"tokens by source should be {expected}")
        if turn.cached_tokens != turn.tokens.reused:
            problems.append(f"usage.prompt_tokens_details.cached_tokens says {turn.cached_tokens}")
        if turn.replica != str(replica):
            problems.append(f"replica {replica} was asked for")
        wrong = question.problem(turn.text) if self.is_demo_model else ""
        if wrong:
            problems.append(wrong)
        if before is not None and not sooner:
            note = self._answer_reuse(before, turn)
            if note or not self.is_demo_model:
                notes.append(note or _NO_ANSWER_REUSED)
            else:
                problems.append("no block with tokens of the last answer was reused")
        self.report.add(
            ReportRow(
                scene=scene,
                question=question.text,
                replica=turn.replica,
                ttft_s=turn.ttft_s,
                tokens=turn.tokens,
                expected=expected,
                answer=turn.text.strip(),
                notes=tuple(notes),
                problems=tuple(problems),
            )
        )
        self.remember(replica, turn)

    def remember(self, replica: int, turn: DemoTurn) -> None:
        """The replica has computed this."""
        self._unsaved.append(self.known.add_turn(replica, turn.prompt_ids, turn.answer_ids))

    def wait_until_saved(self) -> list[str]:
        """Wait until the CPU tier has all that was computed. Returns the problem if it has not in time, or nothing."""
        waiting, self._unsaved = self._unsaved, []
        if all(self.server.wait_until_in("cpu", sequence, SAVE_DEADLINE_S) for sequence in waiting):
            return []
        return [f"what was sent before is not whole in the CPU tier after {SAVE_DEADLINE_S:.0f} s"]

    def clear(self, *tiers: str) -> None:
        """Empty tiers of all replicas and nodes."""
        self.server.clear(*tiers)
        self.known.clear(*tiers)

    def _answer_reuse(self, before: DemoTurn, turn: DemoTurn) -> str:
        """How much of the answer `before` was reused, in blocks that the index calls an answer's; empty: nothing."""
        answer_tokens = turn.tokens.reused - len(before.prompt_ids)
        ends = [
            segment["end"]
            for segment in self.server.lookup(turn.prompt_ids)["segments"]
            if segment["kind"] == "answer" and "cpu" in segment["tiers"]
        ]
        if answer_tokens > 0 and any(end * self.known.block_size <= turn.tokens.reused for end in ends):
            return f"{answer_tokens} of the reused tokens are the last answer's"
        return ""
