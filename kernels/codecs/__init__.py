"""One layer of KV as fewer bytes, and back. ``make_codec`` gives them by name; README.md says which is which."""

from kernels.codecs.base import Codec
from kernels.codecs.cachegen import CacheGenCodec
from kernels.codecs.lossless import LosslessCodec
from kernels.codecs.profile import LEVELS, CodecProfile
from kernels.errors import CodecError

__all__ = ["CODECS", "LEVELS", "Codec", "CodecError", "CodecProfile", "make_codec"]

CODECS = ("lossless", "cachegen")


def make_codec(name: str, level: int = 0, profile: CodecProfile | None = None) -> Codec:
    """The codec of that name. Only ``cachegen`` has levels (1 to 3) and needs a profile.

    Raises ValueError, in a sentence for people, for a name or a level that does not exist, and for cachegen without
    one. Whether the profile belongs to the model is for `CodecProfile.check` to say.
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(CODECS)}")
    if name == "cachegen":
        if profile is None:
            raise ValueError("cachegen needs a profile: the model's, or CodecProfile.generic(shape)")
        return CacheGenCodec(level, profile)
    if level:
        raise ValueError(f"{name} has no levels, got level {level}")
    return LosslessCodec()
