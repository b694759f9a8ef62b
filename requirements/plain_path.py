"""Lets Python run by a path without blanks and quotes, where its environment lies in a folder that has some.

Ray's raylet starts workers by a command without quotes, and tries without an end where that fails. So each Python of
such an environment starts itself once more, through a link: Ray and all else below it then know plain paths only. That
holds for each way to start one: make, the commands in .venv/bin, `serve run` and `ray start` among them.

`install.sh` copies this into such an environment, with a `.pth` file that imports it when Python starts. It needs the
standard library alone.
"""

from __future__ import annotations

import os
import string
import sys
import zlib

PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""In this order, as in `app.launch.surroundings.folder`."""
_PLAIN = frozenset(string.ascii_letters + string.digits + "_@%+=:,./-")
"""What `shlex.quote` leaves alone."""


def enter(project: str) -> None:
    """Start this process once more where its path needs that; return where it does not, or no link can be made.

    `project` can be imported from then on: a line of a `.pth` file that only names a folder may not end in a blank.
    """
    if project not in sys.path:
        sys.path.append(project)
    folder, program = os.path.split(sys.executable or "")
    if _PLAIN.issuperset(sys.executable or ""):
        return
    if folder != os.path.join(sys.prefix, "bin"):
        return  # not this environment's
    link = link_to(sys.prefix)
    if link is not None:
        plain = os.path.join(link, "bin", program)
        os.execv(plain, [plain, *sys.orig_argv[1:]])


def link_to(environment: str, places: tuple[str, ...] = PLACES) -> str | None:
    """A link to the folder `environment`, by a plain path, made where it is not there yet; None where none can be.

    Only this user's own link is used: where others may write, another user's would lead anywhere.
    """
    name = f"crosskv-env-{os.geteuid()}-{zlib.crc32(os.fsencode(environment)):08x}"
    for place in places:
        link = os.path.join(place, name)
        try:
            os.symlink(environment, link)
        except FileExistsError:
            pass
        except OSError:
            continue
        try:
            if os.lstat(link).st_uid == os.geteuid() and os.readlink(link) == environment:
                return link
        except OSError:
            continue
    return None
