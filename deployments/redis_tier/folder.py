"""The data folder of an embedded Redis: its lock, and the files in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from deployments.segment_store.redis_connection import RedisUnavailableError

LOCK_WAIT_S = 5.0
"""Longest time that a predecessor that is just ending may hold the folder."""
LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""
AOF_FILES = ("appendonly.aof", "appendonlydir")
"""Where Redis 6 and Redis 7 and later keep their data."""
ASIDE = "unreadable-"


class RedisFolder:
    """One data folder. All methods but `lock` are for the holder of the lock."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        self.shown = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        """As messages name it: logs and answers are UTF-8, and a path may hold other bytes."""
        self.log = self.path / "redis.log"

    def lock(self) -> int:
        """An open, locked file of the folder; the lock ends when every copy of the descriptor is closed.

        Waits up to LOCK_WAIT_S. Raises RedisUnavailableError: not writable, or used by another.
        """
        lock = self.open()
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise RedisUnavailableError(
                        f"{self.shown} is used by another crosskv server: "
                        "stop that one, or set kv.redis_folder to another folder"
                    ) from None
                time.sleep(0.05)

    def open(self) -> int:
        """The folder's lock file, opened for writing and not locked. Creates both. Raises RedisUnavailableError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RedisUnavailableError(self.refusal(str(error.strerror))) from error

    def refusal(self, why: str) -> str:
        """One sentence for a folder that cannot be written."""
        return f"kv.redis_folder {self.shown} cannot be written ({why}): set it to another folder"

    def has_data(self) -> bool:
        """Whether a server has left something to load."""
        return any((self.path / name).exists() for name in AOF_FILES)

    def move_aside(self) -> None:
        """Hide the data from the next server."""
        for name in AOF_FILES:
            source, target = self.path / name, self.path / (ASIDE + name)
            if source.exists():
                _remove(target)
                source.rename(target)

    def move_back(self) -> None:
        """Undo `move_aside`."""
        for path in self.path.glob(ASIDE + "*"):
            original = path.with_name(path.name.removeprefix(ASIDE))
            _remove(original)
            path.rename(original)

    def drop_aside(self) -> bool:
        """Delete what was moved aside; False when there was nothing."""
        paths = list(self.path.glob(ASIDE + "*"))
        for path in paths:
            _remove(path)
        return bool(paths)

    def make_socket_folder(self) -> Path:
        """A new private folder with a short path; what a killed server left behind is removed."""
        note = self.path / "socket_folder"
        with contextlib.suppress(OSError):
            left_behind = Path(note.read_text(encoding="utf-8"))
            if left_behind.name.startswith("crosskv-"):
                (left_behind / "redis.sock").unlink(missing_ok=True)
                left_behind.rmdir()
        made = tempfile.mkdtemp(prefix="crosskv-")
        if len(made.encode()) + len("/redis.sock") > LONGEST_SOCKET_PATH:
            Path(made).rmdir()
            made = tempfile.mkdtemp(prefix="crosskv-", dir="/tmp")
        note.write_text(made, encoding="utf-8")
        return Path(made)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
