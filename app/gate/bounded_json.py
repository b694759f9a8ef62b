"""JSON from strangers: what a body holds is counted before any object is made of it.

Reading JSON costs up to 30 times its bytes in Python objects, and validating it costs more. So one pass over the raw
bytes, with C's speed, counts values, nesting and digits first. Then the parser refuses what JSON knows only by custom:
NaN and Infinity, a name given twice, text that is no Unicode. Pure: no vLLM, no HTTP.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

DEEPEST = 100
"""Arrays and objects within each other; vLLM takes 64 of them in a JSON schema, which the rest of a request wraps."""
LONGEST_NUMBER = 400
"""Digits in a row; a double has no more than 309 before its point."""

LONGEST_NAME = 1024
"""Characters of an object's member's name, which errors repeat."""

# An unclosed string matches up to the end and nothing is ever tried twice, so that the scan takes linear time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?(?:"|\Z)', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d}" % (LONGEST_NUMBER + 1))
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


class RefusedJsonError(ValueError):
    """Not JSON, or more of it than is read here; the message is meant for the client."""


def read_json(text: bytes, most_values: int) -> Any:
    """What `text` says. `most_values` bounds the values in it, names of an object's members among them.

    Raises:
        RefusedJsonError: it is no JSON in UTF-8, or it is beyond a bound.
    """
    _count(text, most_values)
    try:
        value = _DECODER.decode(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RefusedJsonError("The JSON is not encoded in UTF-8.") from error
    except json.JSONDecodeError as error:
        raise RefusedJsonError(f"This is not JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError as error:
        raise RefusedJsonError(f"The JSON is nested deeper than {DEEPEST} levels.") from error
    if _ESCAPED_SURROGATE.search(text):
        _require_unicode(value)
    return value


def _count(text: bytes, most_values: int) -> None:
    """Refuse what would be too much, without making a Python object for each value."""
    too_many = f"The JSON holds more than {most_values} values. Send less in one request."
    bare, strings = _STRING.subn(b'"', text, count=most_values + 1)
    if strings > most_values or strings + bare.count(b",") + bare.count(b"[") + bare.count(b"{") > most_values:
        raise RefusedJsonError(too_many)
    if _DIGITS.search(bare):
        raise RefusedJsonError(f"A number in the JSON has more than {LONGEST_NUMBER} digits.")
    depth = 0
    for bracket in bare.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth < 0:
            raise RefusedJsonError("This is not JSON: it closes what it has not opened.")
        if depth > DEEPEST:
            raise RefusedJsonError(f"The JSON is nested deeper than {DEEPEST} levels.")


def _members(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if len(name) > LONGEST_NAME:
            raise RefusedJsonError(f"A name in the JSON is longer than {LONGEST_NAME} characters: {name[:64]!a}….")
        if name in members:  # one reader takes the first, another the last: a proxy and we must not differ
            raise RefusedJsonError(f"The JSON gives {name[:64]!a} twice in one object.")
        members[name] = value
    return members


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise RefusedJsonError(f"The number {digits[:32]} is larger than any that is computed with here.")
    return number


def _no_number(name: str) -> NoReturn:
    raise RefusedJsonError(f"{name} is not a number in JSON.")


def _require_unicode(value: Any) -> None:
    """A lone surrogate can be escaped in JSON, but no tokenizer, hash or answer can encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedJsonError("A text in the JSON holds half of a surrogate pair, which is no character.") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_float=_finite, parse_constant=_no_number)
