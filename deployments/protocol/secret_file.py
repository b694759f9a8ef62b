"""Where the server's secret comes from: the environment, else a file that is made once.

* `CROSSKV_SECRET`, 64 hexadecimal digits, wins. Servers that share KV in one Redis need the same.
* Else the file `server_secret` in `kv.redis_folder`, next to the data that it belongs to. The first start makes it:
  whole or not at all, readable by its owner only, and of two starts at once both take the same.
* Where the folder cannot be written the server starts with a secret of its own, and says so: what it stores in Redis
  is not found again by the next start.

Blocks for a few file operations. No message, error or log line holds the secret or a part of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from configs.settings import SettingsError
from kvmanager.segments.server_secret import SECRET_BYTES, ServerSecret

logger = logging.getLogger(__name__)

VARIABLE = "CROSSKV_SECRET"
FILE_NAME = "server_secret"
_OTHERS = 0o077
_HOW_TO_MAKE_ONE = "`openssl rand -hex 32` makes one"


def server_secret(folder: Path, environment: Mapping[str, str] = os.environ) -> ServerSecret:
    """The secret of the server whose Redis data lies in `folder`. Raises SettingsError for one that is none."""
    if given := environment.get(VARIABLE, "").strip():
        secret = _parsed(given)
        if secret is None:
            raise SettingsError(
                f"{VARIABLE} in the environment must be {2 * SECRET_BYTES} hexadecimal digits: {_HOW_TO_MAKE_ONE}."
            )
        return secret
    path = folder / FILE_NAME
    try:
        return _read(path) or _made(path)
    except OSError as error:
        logger.warning(
            "%s cannot be read or written (%s): this start has a secret of its own, and what it stores in Redis is not "
            "found by the next one. Set kv.redis_folder to a folder that can be written, or %s in the environment",
            path,
            error.strerror,
            VARIABLE,
        )
        return ServerSecret(secrets.token_bytes(SECRET_BYTES))


def _read(path: Path) -> ServerSecret | None:
    """Return the file's secret; None: there is no file. Raises SettingsError for a file without a secret, OSError."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                os.fchmod(file.fileno(), 0o600)
                logger.warning("%s could be read by others; now only its owner can. To be sure, make a new one", path)
            text = file.read(4 * SECRET_BYTES)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    secret = _parsed(text.strip())
    if secret is None:
        raise SettingsError(
            f"{path} does not hold a server secret of {2 * SECRET_BYTES} hexadecimal digits: put the right one back, "
            "or delete it, and KV is stored again under another one."
        )
    return secret


def _made(path: Path) -> ServerSecret:
    """Make the file, unless another process is faster; return what it holds then. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # as a whole, and never over another's
    finally:
        draft.unlink(missing_ok=True)
    made = _read(path)
    if made is None:
        raise OSError(2, "it has gone again", str(path))
    return made


def _parsed(text: str) -> ServerSecret | None:
    try:
        return ServerSecret(bytes.fromhex(text))
    except ValueError:
        return None
