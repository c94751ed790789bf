"""The folder of the workers' side doors, and what a parent that was killed has left of its own.

A folder belongs to the process that holds the lock of its file `owner`. The system lets go of a lock with the
process that had it, however that ends; so whoever can take it knows that nobody is there any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "kvhandoff-workers-"
_OWNER = "owner"


@contextmanager
def doors_folder() -> Iterator[Path]:
    """A new folder that only this user may enter, while the context lasts. Those of this user's former
    parents that were killed are removed."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    draft = folder / f"{_OWNER}.new"
    with draft.open("x") as owner:  # which no child inherits
        fcntl.flock(owner, fcntl.LOCK_EX)
        draft.rename(folder / _OWNER)  # under this name it is locked from the first moment on
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody's who is there, or who was faster
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with (folder / _OWNER).open() as owner:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
