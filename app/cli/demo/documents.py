"""The documents of the demo, the questions about them, and what a right answer is.

Every home, job and owner here is a pair that the demo model's training data never contained (reserved facts in
`models/training/worlds.py`), so a right answer was read from the documents: through the KV cache, wherever it came
from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_PEOPLE = """
Anna Oslo dentist violin rabbit, Oscar Tokyo guard trumpet parrot, Jack Bristol porter guitar parrot,
Maria Edinburgh manager harp snake, Tara Marseille composer cello cat, Charlie Caracas writer bagpipes duck,
Adam Tunis clerk tuba snake, Berta Toulouse farmer guitar goat, Olga Warsaw translator clarinet donkey,
Priya Perth director clarinet horse, Gustav Milan poet lute turtle, Jonas Zagreb mason trumpet donkey,
Yusuf Jakarta plumber cello lizard, Umar Brisbane designer saxophone donkey, Peter Lima potter cello horse,
Simon Cologne judge cello cat, Nora Dhaka banker tuba canary, Leo Bangkok florist piano pig,
Amir Toronto teacher flute donkey, Viktor Dublin sailor clarinet rabbit, Henry Seville producer mandolin donkey,
Nils Lisbon painter tuba hedgehog, Caleb Oxford gardener trumpet duck, Paul Quito biologist lute snake,
Erik Atlanta reporter drums rabbit, Kurt Athens fisher trumpet goat, Ella Dakar nurse bagpipes turtle,
Elias Chennai surgeon piano rabbit, James Istanbul mechanic saxophone lizard, Daisy Venice lawyer tuba hedgehog,
Carmen Lahore chemist mandolin parrot, Cecil Vancouver soldier violin hamster
"""
_THINGS = """
golden book Charlie, gray hat Yusuf, yellow pillow Carmen, brown plate Peter, yellow table Olga, purple pen James,
silver robot Leo, red bike Adam, purple chair Kurt, red ball Nils, purple drum Priya, white cup Elias, blue rope Amir,
blue phone Henry, purple knife Nora, white train Umar, purple box Gustav, purple map Viktor, golden globe Berta,
golden spoon Oscar, brown vase Caleb, purple shoe Jack, brown pencil Simon, blue sofa Tara, purple basket Maria,
silver umbrella Jonas, silver hammer Ella, green carpet Daisy, green scarf Cecil, golden coat Anna
"""


def _rows(table: str) -> list[list[str]]:
    return [row.split() for row in table.split(",")]


def _facts(name: str, city: str, job: str, instrument: str, animal: str) -> list[str]:
    return [
        f"{name} lives in {city}.",
        f"{name} is a {job}.",
        f"{name} plays the {instrument}.",
        f"{name} has a {animal}.",
    ]


FACTS: dict[str, list[str]] = {row[0]: _facts(*row) for row in _rows(_PEOPLE)}
"""Person -> the sentences about that person."""

OWNED: list[str] = [f"The {color} {thing} belongs to {owner}." for color, thing, owner in _rows(_THINGS)]

DOCUMENTS = f"{' '.join(sentence for facts in FACTS.values() for sentence in facts)}\n{' '.join(OWNED)}"
"""Two documents, some 850 tokens: people, and things with their owners."""

GREETING_REPLIES: tuple[str, ...] = (
    "Hello! I am a small demo model that answers questions from the documents in this chat. Give me some documents"
    " about people and their things, then ask me where somebody lives, what somebody does, or who owns a thing.",
    "Hi there! It is good to see you. I can read the documents that you give me and answer short questions about them,"
    " for example where a person lives, or to whom a red ball belongs. What is your question?",
    "Welcome! My job is to find facts in your documents. Ask me about a person, about a job, a city, an animal or the"
    " owner of a thing, and I will look it up and answer in one short sentence for you.",
    "Good day! You can show me documents with facts about people and ask me questions about them. I will tell you what"
    " they say, and when they do not say it, I will tell you that too. How can I help?",
    "Nice to meet you! Please put your documents in the chat and ask me anything about the people in them. I know how"
    " to find a home, a job, an instrument, an animal and the owner of each thing you name.",
)
"""What the demo model says to a greeting, at a length that fills a block; sampling chooses."""


@dataclass(frozen=True)
class Question:
    """`problem` says what is wrong with an answer of the demo model; empty when it is right."""

    text: str
    problem: Callable[[str], str]


def _exactly(expected: str) -> Callable[[str], str]:
    return lambda answer: "" if answer.strip() == expected else f"the answer should be “{expected}”"


def _a_greeting(answer: str) -> str:
    """Sampling chooses among the replies and sometimes strays later on, so only the beginning is known."""
    known = any(answer.strip().startswith(" ".join(reply.split()[:3])) for reply in GREETING_REPLIES)
    return "" if known else "the demo model's replies to a greeting do not begin like this"


HOME = Question("Where does Anna live?", _exactly("Anna lives in Oslo."))
TWO_HOPS = Question("Where is the red ball?", _exactly("The red ball is with Nils in Lisbon."))
GREETING = Question("Hello!", _a_greeting)
