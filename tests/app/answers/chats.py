"""A small byte-level BPE with merges, and chats in its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from app.answers.memory import AnswerMemory
from app.answers.returns import Returns
from app.answers.turns import Answers, Conversation, TurnMarks
from app.gate.observed_prompt import Kind

START, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool_call>"
TEXTS = ("the cat sat on the mat and the other cat sat there too", "where is the ball? the ball is there", "çà et là ☃")
WHOSE = Conversation("tenant", "salt")
KIND = Kind("tenant")


class Chats:
    """ChatML with a trained tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        special = [AddedToken(token, special=True, normalized=False) for token in (START, END)]
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=special,
            show_progress=False,
        )  # fmt: skip
        self.tokenizer.train_from_iterator(TEXTS * 20, trainer)
        self.tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
        self.start, self.end, self.tool = (self.tokenizer.token_to_id(token) for token in (START, END, TOOL))
        self.marks = TurnMarks(self.start, frozenset({self.start, self.end, self.tool}), append_only=True)
        self.size = self.tokenizer.get_vocab_size()

    def answers(self, splices: bool = True, most_bytes: int = 1 << 20, outcomes: list[str] | None = None) -> Answers:
        counted: list[str] = [] if outcomes is None else outcomes
        return Answers(
            self.tokenizer, self.marks, AnswerMemory(most_bytes), Returns("auto"), splices, counted.append
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def said(self, ids: Sequence[int]) -> str:
        """What a client sees of sampled tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def render(self, *turns: str, asks: bool = True) -> list[int]:
        """User and assistant take turns; then, if it `asks`, the assistant's begins."""
        text = ""
        for number, turn in enumerate(turns):
            text += f"{START}{'assistant' if number % 2 else 'user'}\n{turn}{END}\n"
        return self.encode(text + (f"{START}assistant\n" if asks else ""))

    def letters(self, text: str) -> list[int]:
        """The text in tokens of one byte each: as no tokenizer would cut it."""
        return [token for character in text for token in self.encode(character)]
