"""Puts sampled tokens back into a rendered prompt, where the text that they stand for has come back.

A chat's next prompt is tokenized again. Where the tokenizer cuts an answer's text otherwise than the model sampled it,
the KV of the answer and of everything behind it is lost. So the tokens between a turn's first special token and its
last are replaced by those that were sampled after the very same tokens, if both decode to the same text.

Invariants:

* the detokenized text of the prompt is the same before and after, and so are all its added tokens, in order;
* only what was sampled for this tenant, under this salt, after exactly the tokens before it, is put in;
* any doubt leaves the rendered tokens, and nothing here raises for what a client sends;
* O(prompt) hashing; decoding only where tokens differ and were not compared before, and of a bounded number of tokens:
  the work that a client causes here holds up the streams of all others.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from app.answers.memory import ID_BYTES, AnswerMemory, Place, RememberedTurn, TenantMemory
from app.answers.returns import History, Returns
from app.gate.observed_prompt import Kind
from app.metrics.labels import AS_SAMPLED, DEFECT, NOT_REMEMBERED, RETOKENIZED, SPLICED

logger = logging.getLogger(__name__)

MOST_TURNS_LOOKED_AT = 4096
MOST_TOKENS_COMPARED = 32_768
"""Decoded for one prompt, or for its answers, some 4 ms; what would need more stays as it was rendered."""
_HASHED_AS_ONE_COMPARED = 64
_TOKENS_OF_A_TEXT = 16
"""Cost of a text in addition to its tokens: the text between two added tokens is decoded by itself."""
_MOST_TOKENS_CUT = 16
"""Tokens at the end of an answer that a stop string may take away."""
_CONTEXT = 8
"""Tokens before an answer that decide how its first one is decoded, and more."""
_INT = np.int32


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """`boundaries` are the ids of the tokenizer's added tokens: the text between two of them is cut into tokens by
    itself. `start` is the one that begins an answer's turn.
    """

    start: int
    boundaries: frozenset[int]
    append_only: bool
    """A conversation's rendering begins with the rendering of every earlier part of it, answers included."""


class Conversation(NamedTuple):
    """The owner of a prompt: answers never pass from one to another."""

    tenant: str
    salt: str
    """Of the prompt's KV: holds the tenant, the request's own salt and its fidelity."""


class Answer(NamedTuple):
    """An answer that has ended. `ids`: without the token that ended it; `left`: what a stop string left of its text."""

    ids: Sequence[int]
    left: str | None = None


class Answers:
    """See the module's docstring."""

    def __init__(
        self,
        tokenizer: Any,
        marks: TurnMarks,
        memory: AnswerMemory,
        returns: Returns,
        splices: bool,
        count: Callable[[str], None],
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`; `count` is told one of `RETURNS` for each answer, once."""
        self._tokenizer = tokenizer
        self._start = marks.start
        self._boundaries = marks.boundaries
        self._is_boundary = np.zeros(max(marks.boundaries) + 2, dtype=bool)
        self._is_boundary[list(marks.boundaries)] = True
        self.memory = memory
        self.returns = returns
        self.splices = splices
        self._count = count
        self._said = False
        self._tokens_left = 0
        """To be decoded for the prompt that is looked at, or is remembered."""

    def splice(self, whose: Conversation, rendered: list[int], history: History | None = None) -> list[int]:
        """The prompt with sampled tokens in it: `rendered` itself where there are none to put in.

        `history`: of the request, whose answers are counted and learned from; None: only look.
        """
        own = self.memory.of(whose.tenant)
        spliced, compared = (rendered, False) if own is None else self._splice(own, whose, rendered, history)
        if history is not None and not compared and history.has_answers:
            self._count(NOT_REMEMBERED)
        return spliced

    def _splice(
        self, own: TenantMemory, whose: Conversation, rendered: list[int], history: History | None
    ) -> tuple[list[int], bool]:
        """The prompt, and whether anything in it was compared with what is remembered."""
        tokens = array("i", rendered)
        data = memoryview(tokens).cast("B")
        flags = self._is_boundary.take(np.frombuffer(tokens, dtype=_INT), mode="clip")
        bounds: list[int] = flags.nonzero()[0].tolist()
        before = _hash_of(whose.salt)
        hashed = copied = 0
        compared = False
        self._tokens_left = MOST_TOKENS_COMPARED
        spliced: list[int] = []
        turns = [number for number, at in enumerate(bounds) if rendered[at] == self._start]
        for number in turns[:MOST_TURNS_LOOKED_AT]:
            at = bounds[number]
            if at < copied:
                continue  # it was sampled in the turn that was just put in
            before.update(data[ID_BYTES * hashed : ID_BYTES * (at + 1)])
            hashed = at + 1
            place = own.find(before.digest())
            if place is None:
                continue
            turn, end = self._find(own, place, rendered, data, bounds, number)
            compared = compared or end > 0
            outcome = AS_SAMPLED
            if turn is not None and turn.ids != data[ID_BYTES * (at + 1) : ID_BYTES * end]:
                outcome = RETOKENIZED
                if self.splices:
                    outcome = SPLICED
                    spliced += rendered[copied : at + 1]
                    spliced += array("i", turn.ids)
                    before.update(turn.ids)
                    hashed = copied = end
            if history is not None:
                self._learn(place, turn, end, outcome, history)
        return (spliced + rendered[copied:] if copied else rendered), compared

    def note_defect(self) -> None:
        """Something here has raised, which is a defect: counted always, said once."""
        self._count(DEFECT)
        if not self._said:
            self._said = True
            logger.exception("sampled answers could not be put back into a prompt (counted)")

    def remember(self, whose: Conversation, prompt: Sequence[int], answers: Iterable[Answer], kind: Kind) -> None:
        """These were sampled after `prompt`."""
        start = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] == self._start), None)
        if start is None:
            return
        before = _hash_of(whose.salt)
        before.update(array("i", prompt[: start + 1]).tobytes())
        place, begun = before.digest(), prompt[start + 1 :]
        self._tokens_left = MOST_TOKENS_COMPARED
        for sampled, left in answers:
            answer = sampled if left is None else self._without_stop(prompt, sampled, left)
            if answer:
                ids = [*begun, *answer]
                inside = array("i", [token for token in ids if token in self._boundaries]).tobytes()
                self.memory.add(whose.tenant, place, RememberedTurn(array("i", ids).tobytes(), inside, kind))

    def _without_stop(self, prompt: Sequence[int], answer: Sequence[int], text: str) -> list[int] | None:
        """Tokens for an answer of which a stop string left `text`: those sampled, up to the first that was cut.

        None where tokens and text do not agree, or where it would take long to tell.
        """
        context = [self._start, *prompt[-_CONTEXT:]]
        said = self._text(context)
        self._tokens_left -= len(answer)
        if self._tokens_left < 0 or not self._text([*context, *answer]).startswith(said + text):
            return None
        for kept in range(len(answer), max(0, len(answer) - _MOST_TOKENS_CUT - 1), -1):
            self._tokens_left -= kept
            if self._tokens_left < 0:
                return None
            whole = self._text([*context, *answer[:kept]])
            if whole.startswith(said) and text.startswith(whole[len(said) :]):
                rest = self._tokenizer.encode(text[len(whole) - len(said) :], add_special_tokens=False).ids
                tokens = [*answer[:kept], *rest]
                return tokens if self._text([*context, *tokens]) == said + text else None
        return None

    def _find(
        self, own: TenantMemory, place: Place, rendered: list[int], data: memoryview, bounds: list[int], number: int
    ) -> tuple[RememberedTurn | None, int]:
        """The remembered turn that the prompt has at boundary `number`, and where it ends.

        (None, 0): none was remembered, or it would take long to tell. (None, end): it goes on with something else.
        """
        at = bounds[number]
        ends = [(turn, bounds[last]) for turn in place.turns if (last := number + 1 + turn.inside) < len(bounds)]
        for turn, end in ends:
            here = data[ID_BYTES * (at + 1) : ID_BYTES * end]
            if turn.ids == here or (turn.rendered and turn.rendered == here):
                return turn, end
        furthest = max((end for _, end in ends), default=at)
        self._tokens_left -= (furthest - at) // _HASHED_AS_ONE_COMPARED
        if not ends or self._tokens_left < 0:
            return None, 0
        unlike = hash(bytes(data[ID_BYTES * (at + 1) : ID_BYTES * furthest]))
        if unlike == place.unlike:
            return None, furthest
        texts: dict[int, bytes | None] = {}
        for turn, end in ends:
            self._tokens_left -= turn.inside
            if self._tokens_left < 0:
                break
            inside = bounds[number + 1 : number + 1 + turn.inside]
            if array("i", [rendered[boundary] for boundary in inside]).tobytes() != turn.boundaries:
                continue
            if end not in texts:
                texts[end] = self._digest(rendered[at + 1 : end])
            turn.text = turn.text or self._digest(array("i", turn.ids)) or b""
            if turn.text and turn.text == texts[end]:
                self.memory.note_rendered(own, turn, bytes(data[ID_BYTES * (at + 1) : ID_BYTES * end]))
                return turn, end
        if self._tokens_left < 0:
            return None, 0
        place.unlike = unlike
        return None, furthest

    def _learn(self, place: Place, turn: RememberedTurn | None, end: int, outcome: str, history: History) -> None:
        if turn is not None and not turn.returned:
            turn.returned = True
            self._count(outcome)
            self.returns.see(turn.kind, outcome != RETOKENIZED)
        elif turn is None and end and not place.diverged:
            place.diverged = True
            latest = place.turns[-1]
            said = self._tokenizer.decode(list(array("i", latest.ids)), skip_special_tokens=True)
            self._count(history.cause(said))
            self.returns.see(latest.kind, False)

    def _digest(self, ids: Sequence[int]) -> bytes | None:
        """Of the added tokens and of each text between two; None: too long for now.

        A text is decoded with a special token before and behind it, for what a decoder does at a text's ends.
        """
        self._tokens_left -= len(ids) + _TOKENS_OF_A_TEXT * (1 + sum(token in self._boundaries for token in ids))
        if self._tokens_left < 0:
            return None
        digest = hashlib.blake2b(digest_size=16)
        between: list[int] = []
        for token in [*ids, self._start]:
            if token in self._boundaries:
                text = self._text([self._start, *between, self._start]).encode("utf-8", "surrogatepass")
                digest.update(b"%d:%d:" % (token, len(text)) + text)
                between = []
            else:
                between.append(token)
        return digest.digest()

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _hash_of(salt: str) -> Any:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass") + b"\0", digest_size=16)
