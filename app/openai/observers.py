"""Observers (`app.gate.observed_prompt`) over parts that know nothing of requests."""

from __future__ import annotations

from app.answers.sampled import Sampled
from app.answers.turns import Answers, Conversation
from app.divergence.recent_prefixes import RecentPrefixes
from app.gate.observed_prompt import SentPrompt


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
