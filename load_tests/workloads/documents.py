"""Questions about long documents that are asked about again.

Source of the parameters: LMCache, ``benchmarks/long_doc_qa`` (github.com/LMCache/LMCache), which adapts vLLM's
``benchmark_long_document_qa_throughput.py``. Every document is sent once (the warm-up round), then ``repeats`` times in
the order that ``order`` says, at most ``concurrency`` requests under way. There a prompt is the document alone; here
the document is a system message and the question after it a new one each time, as a reader would ask.
Real documents do not end where a block of KV does: give shortest lengths, and the others are drawn.
"""

from __future__ import annotations

import random

from load_tests.workloads.limits import at_least, fits
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "long-document-qa"
ORDERS = ("random", "tile", "interleave")


def long_document_qa(
    rng: random.Random,
    text: Words,
    *,
    documents: int = 8,
    document_tokens: int = 20_000,
    question_tokens: int = 20,
    shortest_document_tokens: int | None = None,
    shortest_question_tokens: int | None = None,
    answer_tokens: int = 100,
    repeats: int = 2,
    order: str = "random",
    concurrency: int = 2,
    max_model_tokens: int | None = None,
) -> Workload:
    """``documents`` x (1 + ``repeats``) requests; a repeat waits until its document's first request has ended.

    ``order`` of the repeats: ``random``; ``tile``, all documents, then all again; ``interleave``, a document's repeats
    one after another. Lengths are drawn evenly between the shortest and ``document_tokens`` or ``question_tokens``; all
    are equal where no shortest is given. Raises ValueError for what cannot be.
    """
    shortest_document = document_tokens if shortest_document_tokens is None else shortest_document_tokens
    shortest_question = question_tokens if shortest_question_tokens is None else shortest_question_tokens
    at_least(1, shortest_document_tokens=shortest_document, shortest_question_tokens=shortest_question)
    at_least(shortest_document, document_tokens=document_tokens)
    at_least(shortest_question, question_tokens=question_tokens)
    at_least(1, documents=documents, document_tokens=document_tokens, question_tokens=question_tokens)
    at_least(1, answer_tokens=answer_tokens, repeats=repeats, concurrency=concurrency)
    fits(document_tokens + question_tokens, 2, answer_tokens, max_model_tokens, "ask for a smaller document_tokens")
    contents = [text(rng, rng.randint(shortest_document, document_tokens)) for _ in range(documents)]
    sent = list(range(documents)) + _repeats(rng, documents, repeats, order)
    questions = [text(rng, rng.randint(shortest_question, question_tokens)) for _ in sent]
    requests = [
        Request(
            number=number,
            session=f"document {document}",
            at_s=0.0,
            after=document if number >= documents else None,
            messages=(Message("system", contents[document]), Message("user", questions[number])),
            max_tokens=answer_tokens,
        )
        for number, document in enumerate(sent)
    ]
    return Workload(NAME, mark_returning(requests, text.characters_per_token), concurrency, text.characters_per_token)


def _repeats(rng: random.Random, documents: int, repeats: int, order: str) -> list[int]:
    if order == "interleave":
        return [document for document in range(documents) for _ in range(repeats)]
    sent = list(range(documents)) * repeats
    if order == "random":
        rng.shuffle(sent)
    elif order != "tile":
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}.")
    return sent
