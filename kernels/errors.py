"""What every codec in this package raises for bytes that cannot be what it wrote."""


class CodecError(ValueError):
    """Coded bytes are truncated, overlong or inconsistent. What was decoded so far is undefined; nothing else is."""
