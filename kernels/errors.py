"""The error of every codec in this package for bytes that it cannot have written."""


class CodecError(ValueError):
    """Coded bytes are truncated, overlong or inconsistent. What was decoded so far is undefined; nothing else is."""
