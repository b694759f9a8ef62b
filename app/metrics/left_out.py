"""What of a request was left out before it was answered: told in the answer's header `warnings`, and counted.

Nothing of a client's text is told: names are those of `NAMES`, all others are `other`, and counts are numbers.
"""

from __future__ import annotations

from collections import Counter

HEADER = "warnings"
KINDS = {
    "hosted_tool": "left out tools that would run at the server",
    "grammar": "does not hold answers to the grammars of custom tools",
    "media": "left out media",
    "encrypted": "left out what only its sender can decrypt",
}
"""By kind, which is the metric's label: what the header says of it."""
NAMES = frozenset(
    {
        "apply_patch", "bash", "code_execution", "code_interpreter", "computer", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "memory", "shell", "text_editor", "tool_search", "web_fetch",
        "web_search", "web_search_preview", "image", "document", "audio", "video", "file", "reasoning", "lark", "regex",
    }
)  # fmt: skip
OTHER = "other"


class LeftOut:
    """Of one request: how often each kind was left out, by name."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[str]] = {}

    def note(self, kind: str, name: object) -> None:
        """One more of `KINDS`. `name`: what the client calls it, whatever that is."""
        self._found.setdefault(kind, Counter())[known_name(name)] += 1

    @property
    def counts(self) -> dict[str, int]:
        """How many, by kind."""
        return {kind: names.total() for kind, names in self._found.items()}

    def header(self) -> str:
        """The header's value; empty: nothing was left out."""
        return "; ".join(
            f"{KINDS[kind]}: {', '.join(f'{name} ({count})' for name, count in sorted(names.items()))}"
            for kind, names in self._found.items()
        )


def known_name(name: object) -> str:
    """A name of `NAMES`; a date behind it, as Anthropic's versions have one, is no part of it."""
    text = name if isinstance(name, str) and len(name) <= 64 else ""
    while text not in NAMES and "_" in text:
        text = text.rpartition("_")[0]
    return text if text in NAMES else OTHER
