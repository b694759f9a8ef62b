"""JSON from strangers: read, or refused in words, in time and memory that the bytes bound."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gate.bounded_json import DEEPEST, LONGEST_NUMBER, RefusedJsonError, read_json

MOST = 1000
MEBIBYTE = 1 << 20
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_json_writes_is_read_back(value):
    assert read_json(json.dumps(value).encode(), MOST) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode(), MOST) == value


@given(st.binary(max_size=200) | st.text('[]{}",:\\u dD8905.eE-', max_size=80).map(str.encode))
def test_any_bytes_are_read_or_refused(text: bytes):
    try:
        value = read_json(text, MOST)
    except RefusedJsonError:
        return
    assert value == json.loads(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e400]", "larger"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'"\xff"', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        ('{"a": 1}'.encode("utf-32-le"), "not JSON"),
        (b"9" * (LONGEST_NUMBER + 1), "digits"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "nested"),
        (b"[" + b"1," * MOST + b"1]", "values"),
        (b"[" + b'"a",' * MOST + b'"a"]', "values"),
        (b"[" + b"[]," * MOST + b"[]]", "values"),
        (b"", "not JSON"),
        (b"]", "closes"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_beyond_a_bound_or_no_json_is_refused_in_words(text: bytes, says: str):
    with pytest.raises(RefusedJsonError, match=says):
        read_json(text, MOST)


def test_what_just_fits_is_read():
    assert read_json(b"[" * DEEPEST + b"]" * DEEPEST, MOST)
    assert read_json(b"9" * LONGEST_NUMBER, MOST) == int("9" * LONGEST_NUMBER)
    assert read_json(b'"' + b"[,{" * MOST + b'"', MOST) == "[,{" * MOST
    assert read_json(b'"\\ud83d\\ude00"', MOST) == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    "text",
    [b'"' + b'\\"' * MEBIBYTE, b"\\" * MEBIBYTE, b"]" * MEBIBYTE, b"[" * MEBIBYTE, b'"' * MEBIBYTE, b"9" * MEBIBYTE],
    ids=["escapes", "backslashes", "closers", "openers", "quotes", "digits"],
)
@pytest.mark.timeout(60)  # a scan that tries anything twice takes hours
def test_no_text_makes_the_scan_try_anything_twice(text: bytes):
    with pytest.raises(RefusedJsonError):
        read_json(text, MOST)
