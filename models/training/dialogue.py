"""Conversations about a world: questions with their answers, and how the documents reach the chat.

`Dialogue.messages` and `Dialogue.documents` are what a client would send; `encode` gives token ids and loss weights
and agrees with the chat template token for token (a test holds the two together).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from transformers import PreTrainedTokenizerFast

from models.training import lexicon, phrasing, worlds
from models.training.tokenizer import ASSISTANT, BOS, DOC, END, SYSTEM, USER
from models.training.worlds import World

# Loss weights: the word that was asked for, the rest of an answer, everything the model only reads.
KEY_WEIGHT = 1.0
# The token after "The red ball": a thing is stated once, so its absence is the hardest thing to see.
DECISION = 3
DECISION_WEIGHT = 3.0
ANSWER_WEIGHT = 0.5
READ_WEIGHT = 0.03


@dataclass(frozen=True)
class Turn:
    """One question with its answer; `kind` groups turns in the measurements."""

    kind: str
    question: str
    answer: str
    # A recital stops anywhere, so its end must not be learned.
    learn_end: bool = True


@dataclass
class Dialogue:
    """What a client sends: an optional system text, documents beside the messages, and turns."""

    system: str
    documents: list[dict[str, str]]
    turns: list[Turn]
    # Text (documents) that stands before the first question in the user's own message.
    preamble: str = ""
    kinds: list[str] = field(default_factory=list)

    def messages(self, turns: int | None = None, last_answer: bool = True) -> list[dict[str, str]]:
        """OpenAI messages of the first `turns` turns."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        chosen = self.turns[:turns]
        for index, turn in enumerate(chosen):
            question = self.preamble + turn.question if index == 0 else turn.question
            messages.append({"role": "user", "content": question})
            if last_answer or index < len(chosen) - 1:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


def question_about(rng: Random, world: World, kind: str) -> Turn:
    """A question of `kind` that the world answers, or, for kinds ending in `unknown`, one that it does not."""
    if kind in phrasing.PERSON_FACTS:
        holders = [name for name, facts in world.people.items() if kind in facts]
        if not holders:
            kind, holders = "city", list(world.people)
        name = rng.choice(holders)
        answer = phrasing.PERSON_FACTS[kind].format(name=name, value=world.people[name][kind])
        return Turn(kind, rng.choice(phrasing.QUESTIONS[kind]).format(name=name), f" {answer}")
    if kind in ("owner", "where"):
        if not world.items:
            return question_about(rng, world, "city")
        item = rng.choice(world.items)
        answer = worlds.item_sentence(item) if kind == "owner" else worlds.where_sentence(world, item)
        question = rng.choice(phrasing.QUESTIONS[kind]).format(color=item.color, object=item.object)
        return Turn(kind, question, f" {answer}")
    if kind == "tell":
        name = rng.choice(list(world.people))
        sentences = worlds.person_sentences(name, world.people[name])
        rng.shuffle(sentences)
        opening, closing = rng.choice(phrasing.TELL_OPENINGS), rng.choice(phrasing.TELL_CLOSINGS)
        answer = f"{opening.format(name=name)} {' '.join(sentences)}{closing.format(name=name)}"
        return Turn(kind, rng.choice(phrasing.QUESTIONS[kind]).format(name=name), answer)
    if kind == "talk":
        asked, answered = rng.choice(phrasing.SMALL_TALK)
        return Turn(kind, rng.choice(asked), rng.choice(answered))
    if kind == "recite":
        return _recital(rng, world)
    return _unknown(rng, world, kind)


def _unknown(rng: Random, world: World, kind: str) -> Turn:
    name = rng.choice(world.absent_names())
    color, thing = _absent_thing(rng, world)
    if kind == "unknown person":
        asked = rng.choice(("city", "city", "job", "instrument", "animal", "tell"))
        template = rng.choice(phrasing.QUESTIONS[asked])
    elif kind == "unknown thing":
        template = rng.choice(phrasing.QUESTIONS[rng.choice(("owner", "where"))])
    elif kind == "other color":  # the thing is there, but not in this colour
        if not world.items:
            return _unknown(rng, world, "unknown person")
        thing = rng.choice(world.items).object
        taken = {item.color for item in world.items if item.object == thing}
        color = rng.choice([color for color in lexicon.COLORS if color not in taken])
        template = rng.choice(phrasing.QUESTIONS[rng.choice(("owner", "where"))])
    elif kind == "missing":  # a known person, but not this attribute
        lacking = [(n, k) for n, facts in world.people.items() for k in phrasing.PERSON_FACTS if k not in facts]
        if not lacking:
            return _unknown(rng, world, "unknown person")
        name, attribute = rng.choice(lacking)
        template = rng.choice(phrasing.QUESTIONS[attribute])
    else:  # a question of a kind that no document answers
        group = (phrasing.UNANSWERABLE_PERSON, phrasing.UNANSWERABLE_OBJECT, phrasing.UNANSWERABLE)
        template = rng.choice(rng.choice(group))
        if world.people and rng.random() < 0.7:
            name = rng.choice(list(world.people))
    question = template.format(name=name, color=color, object=thing)
    about_thing = template in phrasing.QUESTIONS["owner"] or template in phrasing.QUESTIONS["where"]
    answer = phrasing.THING_NOT_SAID.format(color=color, object=thing) if about_thing else phrasing.NOT_SAID
    return Turn(kind, question, answer)


def _absent_thing(rng: Random, world: World) -> tuple[str, str]:
    """A colour and a thing that the world does not have in any colour (or, if it has all, not in this one)."""
    present = {(item.color, item.object) for item in world.items}
    kinds = {item.object for item in world.items}
    absent = [thing for thing in lexicon.OBJECTS if thing not in kinds] or list(lexicon.OBJECTS)
    return rng.choice([(color, thing) for color in lexicon.COLORS for thing in absent if (color, thing) not in present])


def _recital(rng: Random, world: World, limit: int = 160) -> Turn:
    """Statement mode: up to `limit` facts and two-hop consequences in random order; dense supervision."""
    sentences = [s for name, facts in world.people.items() for s in worlds.person_sentences(name, facts)]
    for item in world.items:
        sentences += [worlds.item_sentence(item), worlds.where_sentence(world, item)]
    rng.shuffle(sentences)
    return Turn("recite", rng.choice(phrasing.RECITE), " " + " ".join(sentences[:limit]), learn_end=False)


def compose(rng: Random, world: World, turns: list[Turn]) -> Dialogue:
    """Put a world's documents into a chat in one of the ways that clients do."""
    texts = worlds.documents(rng, world)
    separator = rng.choice((" ", " ", " ", "\n"))
    bodies = [separator.join(text) for text in texts]
    system = rng.choice(phrasing.SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
    way = rng.random()
    if way < 0.45:
        titled = rng.random() < 0.3
        documents = [
            {"title": rng.choice(lexicon.TITLES), "text": body} if titled else {"text": body} for body in bodies
        ]
        return Dialogue(system, documents, turns)
    joined = rng.choice(("\n", "\n\n", " ")).join(bodies)
    if way < 0.8:
        lead = f"{system}{rng.choice((' ', chr(10)))}" if system else ""
        return Dialogue(lead + joined, [], turns)
    return Dialogue(system, [], turns, preamble=joined + rng.choice(("\n", "\n\n", " ")))


def _body(text: str) -> str:
    return f" {text}" if text and text[0] not in " \n\t\r" else text


def encode(
    dialogue: Dialogue, tokenizer: PreTrainedTokenizerFast, key_ids: frozenset[int]
) -> tuple[list[int], list[float]]:
    """Token ids of the whole conversation, and for each the loss weight of predicting *it*."""
    ids: list[int] = []
    weights: list[float] = []

    def read(text: str) -> None:
        new = tokenizer.encode(text, add_special_tokens=False)
        ids.extend(new)
        weights.extend([READ_WEIGHT] * len(new))

    head = BOS
    if dialogue.system or dialogue.documents:
        head += SYSTEM + _body(dialogue.system)
        for document in dialogue.documents:
            title = f"{_body(document['title'])}\n" if "title" in document else ""
            head += DOC + title + _body(document["text"])
        head += END
    read(head)
    for index, turn in enumerate(dialogue.turns):
        question = dialogue.preamble + turn.question if index == 0 else turn.question
        read(f"{USER}{_body(question)}{END}{ASSISTANT}")
        answer = tokenizer.encode(turn.answer, add_special_tokens=False)
        ids.extend(answer)
        # Whether the documents say it is decided at the first words, so all of a refusal counts in full.
        refused = turn.answer.lower().endswith(phrasing.NOT_SAID.lower())
        counted = [KEY_WEIGHT if refused or token in key_ids else ANSWER_WEIGHT for token in answer]
        if turn.answer.startswith(" The "):
            counted[DECISION] = DECISION_WEIGHT
        weights.extend(counted)
        ids.append(tokenizer.eos_token_id)
        weights.append(ANSWER_WEIGHT if turn.learn_end else 0.0)
    return ids, weights
