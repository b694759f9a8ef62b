"""Media in a conversation: with `http.drop_media` a sentence stands in its place, where the model can go on without.

That is in messages before the last one, and in what a tool returned. What the last message itself shows is what the
model is to look at: it stays, and `app.gate.request_bounds` refuses it.
"""

from __future__ import annotations

from typing import Any

from app.gate.request_context import current_request
from app.metrics.left_out import known_name

_TYPES = {
    "image": "image", "image_url": "image", "input_image": "image", "image_pil": "image",
    "computer_screenshot": "image",
    "document": "document", "file": "file", "input_file": "file", "container_upload": "file",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
    "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
"""Parts that are media, by type: what they are called."""
_FIELDS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "input_audio": "audio"}
"""The same by field, where a part has no type."""


def kind_of(part: Any) -> str | None:
    """What kind of media a part is, in a word of ours; None for any other part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str):
        return _TYPES.get(kind)
    return next((name for field, name in _FIELDS.items() if kind is None and field in part), None)


def in_place_of(kind: str, text_type: str) -> dict[str, str]:
    """The part that stands in the place of media; notes that it was left out. `text_type`: of a text part here."""
    current_request().left_out.note("media", kind)
    return {"type": text_type, "text": f"[{known_name(kind)} left out: this server reads text only]"}
