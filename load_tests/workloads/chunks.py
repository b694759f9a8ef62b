"""Questions about several documents at once, in an order that never came before: retrieval-augmented generation.

Source of the setting: CacheBlend (EuroSys'25, arXiv 2405.16444, section 7: 6 chunks of about 512 tokens), and LMCache's
``benchmarks/rag`` (github.com/LMCache/LMCache). A prompt is a system prompt that all share, ``chunks`` of the
documents as messages of their own, and a question. A prefix cache finds the system prompt and, by chance, a document or
two behind it. Every length is drawn, so that nothing ends where a block of KV or a segment does.
"""

from __future__ import annotations

import math
import random

from load_tests.workloads.limits import at_least, fits
from load_tests.workloads.repeated_messages import mark_returning_messages
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "rearranged-chunks"


def rearranged_chunks(
    rng: random.Random,
    text: Words,
    *,
    documents: int = 24,
    chunks: int = 6,
    document_tokens: int = 600,
    shortest_document_tokens: int | None = 424,
    system_tokens: int = 128,
    shortest_system_tokens: int | None = 100,
    question_tokens: int = 60,
    shortest_question_tokens: int | None = 10,
    answer_tokens: int = 16,
    appearances: int = 4,
    concurrency: int = 2,
    max_model_tokens: int | None = None,
) -> Workload:
    """``documents`` x ``appearances`` / ``chunks`` requests, rounded up; no two have the same documents in one order.

    Each document is in about ``appearances`` of them. Lengths are drawn evenly from the shortest one on; all are equal
    where it is None. Raises ValueError for what cannot be.
    """
    ranges = {
        "document_tokens": (shortest_document_tokens, document_tokens),
        "system_tokens": (shortest_system_tokens, system_tokens),
        "question_tokens": (shortest_question_tokens, question_tokens),
    }
    lengths = {
        name: (longest if shortest is None else shortest, longest) for name, (shortest, longest) in ranges.items()
    }
    for name, (shortest, longest) in lengths.items():
        at_least(1, **{f"shortest_{name}": shortest})
        at_least(shortest, **{name: longest})
    at_least(1, chunks=chunks, answer_tokens=answer_tokens, appearances=appearances, concurrency=concurrency)
    at_least(chunks, documents=documents)
    fits(
        system_tokens + chunks * document_tokens + question_tokens,
        chunks + 2,
        answer_tokens,
        max_model_tokens,
        "ask for a smaller document_tokens or fewer chunks",
    )
    prompts = -(-documents * appearances // chunks)
    if prompts > math.perm(documents, chunks):
        raise ValueError(f"{documents} documents have fewer orders than {prompts}; ask for fewer appearances.")

    def drawn(name: str, role: str) -> Message:
        return Message(role, text(rng, rng.randint(*lengths[name])))

    system = drawn("system_tokens", "system")
    contents = [drawn("document_tokens", "user") for _ in range(documents)]
    requests = [
        Request(
            number=number,
            session=f"prompt {number}",
            at_s=0.0,
            after=None,
            messages=(system, *(contents[document] for document in order), drawn("question_tokens", "user")),
            max_tokens=answer_tokens,
        )
        for number, order in enumerate(_orders(rng, documents, chunks, prompts))
    ]
    marked = mark_returning_messages(requests)
    return Workload(NAME, marked, concurrency, text.characters_per_token, reuse="messages")


def _orders(rng: random.Random, documents: int, chunks: int, prompts: int) -> list[tuple[int, ...]]:
    """The numbers of each prompt's documents: all different orders."""
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < prompts:
        orders[tuple(rng.sample(range(documents), chunks))] = None
    return list(orders)
