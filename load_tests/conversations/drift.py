"""How much of a sampled answer's KV does the next turn lose, and what does giving the tokens back cost?

    python -m load_tests.conversations.drift

No engine: answers are texts whose tokens are split in two at a given rate, as a model that samples does now and then.
Of each next turn it is counted how many tokens of the turn before, prompt and answer, its prompt does not begin with:
their KV is lost. Once with the tokens as the template renders them, once with the sampled ones put back.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from random import Random
from typing import Annotated, Any

import typer

from app.answers.divergence import History
from app.answers.memory import AnswerMemory
from app.answers.returns import Returns
from app.answers.turns import Answer, Answers, Conversation, TurnMarks
from app.gate.observed_prompt import Kind
from load_tests.conversations.templates import Model, models, tool_call
from load_tests.measuring import report
from load_tests.measuring.program import JsonFile, progress_bar
from load_tests.measuring.spread import percentile

MEMORY_BYTES = 64 << 20
WHOSE, KIND = Conversation("tenant", "salt"), Kind("tenant")


@dataclass(frozen=True)
class Case:
    """What is said: `split_rate` of the answers' tokens are sampled as two."""

    model: str
    answers: str
    """`text`, `thinking` (reasoning before it, which the template strips), `call` or `spaceless call`."""
    answer_tokens: int
    split_rate: float


@dataclass(frozen=True)
class Row:
    """Means by next turn, in tokens; `splice_us`: what one prompt cost, median and 95th percentile."""

    case: Case
    next_turns: int
    known: float
    diverged_share: float
    lost: float
    lost_spliced: float
    splice_us: float
    splice_p95_us: float
    outcomes: dict[str, int]


def cases() -> list[Case]:
    """Short and long answers, at rates from none to a twentieth."""
    found = [
        Case(model, "text", length, rate)
        for model in ("demo", "chatml", "llama")
        for length, rate in ((100, 0.0), (100, 0.001), (100, 0.01), (100, 0.05), (1000, 0.001), (1000, 0.01))
    ]
    found += [Case("thinking", kind, 300, 0.01) for kind in ("text", "thinking")]
    return found + [Case("tools", kind, 40, rate) for kind in ("call", "spaceless call") for rate in (0.0, 0.01)]


def sampled(model: Model, text: str, rate: float, rng: Random) -> list[int]:
    """The text's tokens, of which each is in two with this probability, where it can be."""
    ids: list[int] = []
    special = frozenset(model.tokenizer.added_tokens_decoder)
    for token in model.backend.encode(text, add_special_tokens=False).ids:
        written = model.backend.decode([token], skip_special_tokens=False)
        can_be = len(written) > 1 and written.isascii() and token not in special
        if can_be and rng.random() < rate:
            cut = rng.randrange(1, len(written))
            for part in (written[:cut], written[cut:]):
                ids += model.backend.encode(part, add_special_tokens=False).ids
        else:
            ids.append(token)
    return ids


def say(model: Model, case: Case, rng: Random) -> tuple[str, dict[str, Any]]:
    """What the model says, and the message that the client keeps of it."""
    start = rng.randrange(len(model.words) - 4000)
    words = " ".join(model.words[start : start + max(8, int(case.answer_tokens * 0.6))]).strip()
    if case.answers == "text":
        words = model.lead + words
        return words, {"role": "assistant", "content": words}
    if case.answers == "thinking":
        thought = f"<think>\n{words}\n</think>\n\nSo it is."
        return thought, {"role": "assistant", "content": thought}
    arguments = {"query": words[:60], "most": rng.randrange(100)}
    call = tool_call("search", arguments, spaced=case.answers == "call")
    return call, {"role": "assistant", "content": "", "tool_calls": [{"name": "search", "arguments": arguments}]}


def common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    differing = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def run(model: Model, case: Case, conversations: int, turns: int) -> Row:
    """All conversations of a case, in turns, as an ingress sees them."""
    boundaries = frozenset(int(token) for token in model.tokenizer.added_tokens_decoder)
    start = next(token for token in reversed(model.render([{"role": "user", "content": "?"}])) if token in boundaries)
    outcomes: Counter[str] = Counter()

    def count(outcome: str) -> None:
        outcomes[outcome] += 1

    answers = Answers(
        model.backend, TurnMarks(start, boundaries, True), AnswerMemory(MEMORY_BYTES), Returns("auto"), True, count
    )
    known, lost, spliced_lost, times = [], [], [], []
    for number in range(conversations):
        rng = Random(f"{case}/{number}")
        messages: list[dict[str, Any]] = []
        before: list[int] = []
        before_rendered: list[int] = []
        for turn in range(turns):
            asked = " ".join(model.words[at : at + 30]) if (at := rng.randrange(len(model.words) - 30)) else "?"
            messages.append({"role": "user", "content": asked.strip() or "?"})
            rendered = model.render(messages)
            began = time.perf_counter()
            prompt = answers.splice(WHOSE, rendered, History(messages))
            times.append(1e6 * (time.perf_counter() - began))
            if turn:
                known.append(len(before_rendered))
                lost.append(len(before_rendered) - common(before_rendered, rendered))
                spliced_lost.append(len(before) - common(before, prompt))
            text, message = say(model, case, rng)
            ids = sampled(model, text, case.split_rate, rng)
            answers.remember(WHOSE, prompt, [Answer(ids)], KIND)
            before, before_rendered = [*prompt, *ids], [*rendered, *ids]
            messages.append(message)
    return Row(
        case, len(known), statistics.mean(known), sum(map(bool, lost)) / len(lost), statistics.mean(lost),
        statistics.mean(spliced_lost), statistics.median(times), percentile(times, 95), dict(outcomes),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """In Markdown."""
    head = [
        "template", "answers", "tokens", "split", "known tokens", "next turns that differ", "lost", "lost, spliced",
        "splice, µs (p95)", "outcomes",
    ]  # fmt: skip
    body = [
        [
            row.case.model, row.case.answers, str(row.case.answer_tokens), f"{100 * row.case.split_rate:g} %",
            f"{row.known:.0f}", f"{100 * row.diverged_share:.0f} %", f"{row.lost:.0f}", f"{row.lost_spliced:.0f}",
            f"{row.splice_us:.0f} ({row.splice_p95_us:.0f})",
            ", ".join(f"{name} {number}" for name, number in sorted(row.outcomes.items())),
        ]
        for row in rows
    ]  # fmt: skip
    return report.table(head, body)


def main(
    conversations: Annotated[int, typer.Option(min=1)] = 20,
    turns: Annotated[int, typer.Option(min=2)] = 6,
    json_file: JsonFile = None,
) -> None:
    """Print, for each template and kind of answer, what next turns lose."""
    known = {model.name: model for model in models()}
    with progress_bar() as progress:
        tracked = progress.track(cases(), description="cases")
        rows = [run(known[case.model], case, conversations, turns) for case in tracked]
    report.deliver(table(rows), {"rows": [asdict(row) for row in rows]}, json_file)


if __name__ == "__main__":
    typer.run(main)
