"""Text of a given number of tokens, made of common words in random order."""

from __future__ import annotations

import random
from collections.abc import Callable

_COMMON = """
    about above after again all also always and another any around back because been before began being below between
    big book both build call came change city close come could country course day did different does done door down
    draw early earth end enough even every example eye face fact family far father few field find fire first follow
    food for form found four from garden gave get give good great green ground group grow half hand hard has have head
    hear help here high him his home horse hour house how idea important into just keep kind king knew know land large
    last late later learn leave left letter life light like line list little live long look made make man many mark
    may mean might mile miss money moon more morning most mother mountain move much music must name near need never
    new next night north not notice number off often old once one only open order other our out over own page paper
    part pass people picture piece place plain plan plant play point power press problem product pull put question
    quick rain reach read real red remember rest right river road rock room round rule run same saw say school sea
    second see seem sentence set several shall ship short should show side simple since six small snow some song soon
    sound south space special spell stand star start state step still stop story street strong study such sun sure
    table take talk teach tell ten test than that the their them then there these they thing think this those though
    thought three through time to together told too took top toward town travel tree true try turn two under unit
    until up upon use usual very voice vowel walk want war warm was watch water way week well went were what wheel when
    where which while white who whole why will wind with without wonder wood word work world would write year young
"""
WORDS = tuple(_COMMON.split())
_MOST_ROUNDS = 16
"""Corrections of a text's length; a tokenizer that cuts at spaces needs two or three."""


class Words:
    """Makes texts for one tokenizer. ``count`` tells a text's tokens, without special ones, as in the middle of a text.

    Texts that are drawn one after another have nothing in common but by chance: equal texts come from equal states of
    the random number generator only.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        sample = " ".join(WORDS)
        self._words_per_token = len(WORDS) / max(1, count(sample))
        self.characters_per_token = (len(sample) + 1) / max(1, count(sample))
        """On average, in the texts that it makes."""

    def __call__(self, rng: random.Random, tokens: int) -> str:
        """Words with single spaces between them, of ``tokens`` tokens: exactly, where every word is one; else nearly.

        Raises ValueError when ``tokens`` is below 1.
        """
        if tokens < 1:
            raise ValueError(f"a text must have at least one token, got {tokens}.")
        words: list[str] = []
        for _ in range(_MOST_ROUNDS):
            missing = tokens - (self._count(" ".join(words)) if words else 0)
            change = round(missing * self._words_per_token) or (missing > 0) - (missing < 0)
            if change > 0:
                words += rng.choices(WORDS, k=change)
            elif change < 0 and len(words) > 1:
                del words[max(1, len(words) + change) :]
            else:
                break
        return " ".join(words)
