"""Parts of messages that are text in another wrapping, and media, in whose place a sentence may stand.

Text are documents, results of searches, what a server's tools did. Files are not read: a document counts as text where
its text stands in the request, as it is or in base64.

With `http.drop_media` media are replaced where the model can go on without: in messages before the last one, and in
what a tool returned. What the last message itself shows is what the model is to look at: it stays, and
`app.gate.request_bounds` refuses it.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from app.gate.request_context import current_request
from app.metrics.left_out import known_name

Part = dict[str, Any]

_NOT_FOR_MODELS = frozenset(
    {
        "type", "id", "tool_use_id", "call_id", "status", "cache_control", "citations", "signature",
        "encrypted_content", "encrypted_index",
        "container_id", "container", "caller", "file_id", "image_url", "file_data", "file_url",
        "partial_image_b64", "result",
    }
)  # fmt: skip
"""Fields that say nothing in words."""
_SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result")
_SERVER_RESULT = "_tool_result"
_MEDIA = {
    "image": "image", "image_url": "image", "input_image": "image", "image_pil": "image",
    "computer_screenshot": "image",
    "document": "document", "file": "file", "input_file": "file", "container_upload": "file",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
    "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
"""Parts that are media, by type: what they are called."""
_MEDIA_FIELDS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "input_audio": "audio"}
"""The same by field, where a part has no type."""


def text_of(part: Any) -> str | None:
    """The text of a part that holds nothing else, in Anthropic's or OpenAI's words; None for any other part."""
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        return None
    if kind in _SERVER_BLOCKS or (kind.endswith(_SERVER_RESULT) and kind != "tool_result"):
        return _lines(f"[{_word(part.get('name')) or _word(kind)}]", in_words(part.get("input", part.get("content"))))
    return _plain_text_of(part, kind)


def _plain_text_of(part: Part, kind: str) -> str | None:
    """The same for parts whose text stands in them as it is, so that nothing in it is written as JSON again."""
    if kind == "document":
        return _document(part)
    if kind == "search_result":
        return _lines(part.get("title"), part.get("source"), *_texts(part.get("content")))
    if kind in ("file", "input_file"):
        inner = part.get("file") if isinstance(part.get("file"), dict) else part
        assert isinstance(inner, dict)
        text = _of_data_url(inner.get("file_data"))
        return None if text is None else _lines(inner.get("filename"), text)
    if kind == "compaction":
        return part["content"] if isinstance(part.get("content"), str) else None
    return None


def in_words(value: Any) -> str:
    """A JSON value as text, without the fields that say nothing in words."""
    told = _told(value)
    return told if isinstance(told, str) else "" if told is None else json.dumps(told, ensure_ascii=False)


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and (text := _plain_text_of(value, kind)) is not None:
            return text
        return {name: _told(one) for name, one in value.items() if name not in _NOT_FOR_MODELS}
    return [_told(one) for one in value] if isinstance(value, list) else value


def _document(part: Part) -> str | None:
    source = part.get("source")
    if not isinstance(source, dict):
        return None
    kind, data = source.get("type"), source.get("data")
    if kind == "text" and isinstance(data, str):
        texts: list[str] | None = [data]
    elif kind == "content":
        texts = _all_texts(source.get("content"))
    elif kind == "base64" and str(source.get("media_type")).startswith("text/"):
        decoded = _decoded(data)
        texts = None if decoded is None else [decoded]
    else:
        texts = None
    return None if texts is None else _lines(part.get("title"), part.get("context"), *texts)


def _all_texts(content: Any) -> list[str] | None:
    """The texts of a content that holds nothing else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    texts = _texts(content)
    return texts if len(texts) == len(content) else None


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [one["text"] for one in parts if isinstance(one, dict) and isinstance(one.get("text"), str)]


def _of_data_url(url: Any) -> str | None:
    """The text of a `data:text/…` URL; None for any other."""
    if not isinstance(url, str) or not url.startswith("data:text/"):
        return None
    head, comma, data = url.partition(",")
    return _decoded(data) if comma and head.endswith(";base64") else None


def _decoded(data: Any) -> str | None:
    if not isinstance(data, str):
        return None
    try:
        return base64.b64decode(data, validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _word(value: Any) -> str:
    return value[:64] if isinstance(value, str) else ""


def kind_of(part: Any) -> str | None:
    """What kind of media a part is, in a word of ours; None for any other part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str):
        return _MEDIA.get(kind)
    return next((name for field, name in _MEDIA_FIELDS.items() if kind is None and field in part), None)


def in_place_of(kind: str, text_type: str) -> dict[str, str]:
    """The part that stands in the place of media; notes that it was left out. `text_type`: of a text part here."""
    current_request().left_out.note("media", kind)
    return {"type": text_type, "text": f"[{known_name(kind)} left out: this server reads text only]"}
