"""A body that does not validate is answered with one sentence about one field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from app.dialects.error_messages import sentence


class User(BaseModel):
    role: Literal["user"]
    content: str | list[str]


class Bot(BaseModel):
    role: Literal["bot"]
    content: str | None = None


class Asked(BaseModel):
    messages: list[User | Bot] = []
    seed: int | None = None
    stop: str | list[str] | None = None
    effort: Literal["low", "high"] | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0
    names: Annotated[list[str], Field(max_length=2)] = []
    biases: dict[str, float] = {}


def said_of(body: Any) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Asked).validate_python(body)
    return sentence([{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()])


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"seed": "many"}, "`seed` must be a whole number.", "seed"),
        ({"stop": 5}, "`stop` must be a text or a list.", "stop"),
        ({"effort": "most"}, "`effort` must be 'low' or 'high'.", "effort"),
        ({"share": 2}, "`share` must be less than or equal to 1.", "share"),
        ({"names": ["a"] * 3}, "`names` holds more than 2 entries.", "names"),
        ({"messages": [{"role": "user", "content": 5}]}, "`messages.0.content` must be a text or a list.", None),
        ({"messages": [{"role": "user"}]}, None, None),
        ({"messages": "hello"}, "`messages` must be a list.", "messages"),
        ({"biases": {"a": "b"}}, "`biases.a` must be a number.", "biases.a"),
    ],
)
def test_it_names_the_field_and_what_it_must_be(body: Any, said: str | None, param: str | None):
    message, field = said_of(body)
    assert said is None or message == said
    assert param is None or field == param
    assert message.startswith("`")


def test_what_a_client_wrote_is_no_part_of_it():
    message, field = said_of({"biases": {"a" * 5000: "b"}})
    assert len(message) < 400
    assert field is not None
    assert len(field) <= 128


def test_an_entry_without_its_field_is_one_of_the_messages():
    error = {"type": "string_type", "loc": (0, "id"), "msg": "Input should be a valid string"}
    assert sentence([error], "messages") == ("An entry in `messages` is wrong: `0.id` must be a text.", "messages")


@pytest.mark.parametrize("errors", [[], [None], [{"type": "value_error"}], [{"type": "x", "loc": (), "msg": ""}]])
def test_errors_of_any_shape_make_a_sentence(errors: list[Any]):
    message, _ = sentence(errors)
    assert message.endswith(".")
