"""Observers (`app.gate.observed_prompt`) over parts that know nothing of requests: chats' answers, and prompts that
part.

Leans on vLLM: a `CompletionOutput` has `token_ids` and `text` since the last one, or all of them in the only one; the
token that ended an answer is among them, with `finish_reason` "stop" and a `stop_reason` that is no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.answers.memory import MOST_TURNS
from app.answers.turns import Answer, Answers, Conversation
from app.divergence.recent_prefixes import RecentPrefixes
from app.gate.observed_prompt import Kind, SentPrompt

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@dataclass(slots=True)
class _SampledChoice:
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended: bool = False
    cut: bool = False
    """A stop string has ended it, which the text does not hold."""


class Sampled:
    """The answers to one prompt, each remembered when it has ended.

    An aborted answer is forgotten: how much of it its client has is unknown.
    """

    def __init__(self, answers: Answers, whose: Conversation, prompt: list[int], kind: Kind) -> None:
        self._answers = answers
        self._whose = whose
        self._prompt = prompt
        self._kind = kind
        self._choices: dict[int, _SampledChoice] = {}

    def hear(self, output: RequestOutput, replica: str) -> None:
        """The next output of the request, from whichever replica."""
        for completion in output.outputs:
            choice = self._choices.setdefault(completion.index, _SampledChoice())
            choice.ids += completion.token_ids
            choice.text.append(completion.text)
            choice.ended = choice.ended or completion.finish_reason in ("stop", "length")
            if completion.finish_reason == "stop":
                choice.cut = isinstance(completion.stop_reason, str)
                if not choice.cut:
                    del choice.ids[-1:]

    def end(self, failed: str) -> None:
        """The request has ended; what failed is not remembered. Raises nothing."""
        if failed:
            return
        try:
            self._remember()
        except Exception:
            self._answers.note_defect()

    def _remember(self) -> None:
        ended = [choice for choice in self._choices.values() if choice.ended]
        answers = [Answer(choice.ids, "".join(choice.text) if choice.cut else None) for choice in ended[-MOST_TURNS:]]
        self._answers.remember(self._whose, self._prompt, answers, self._kind)


class RememberedChats:
    """Remembers the answers of chats, so that they can be put back as they were sampled."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def begin(self, prompt: SentPrompt) -> Sampled | None:
        """See `PromptObserver`."""
        if prompt.kind is None:
            return None
        whose = Conversation(prompt.context.tenant, prompt.request.cache_salt)
        return Sampled(self._answers, whose, prompt.request.prompt_token_ids, prompt.kind)


class PartingPrompts:
    """Sees where a tenant's prompts part."""

    def __init__(self, prefixes: RecentPrefixes) -> None:
        self._prefixes = prefixes

    def begin(self, prompt: SentPrompt) -> None:
        """See `PromptObserver`."""
        self._prefixes.see(prompt.context.tenant, prompt.request.cache_salt, prompt.request.prompt_token_ids)
