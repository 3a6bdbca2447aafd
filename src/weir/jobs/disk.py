"""The disk of batch jobs. All that they write goes through a Disk, so a test can have one that is full, fails, or loses what was not made durable."""

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # the errors of file systems that do not make names durable


class Disk:
    """The disk of this machine. What it cannot do raises OSError."""

    def create(self, path: Path, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
        """Open a file to write to it; a new one can be read by the user of this process alone."""
        return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))

    def keep(self, part: Path, path: Path) -> int:
        """Make the file `part` durable, under the name `path`; return its size. If that fails, there is no file `path`."""
        size = self.sync_file(part)
        self.rename(part, path)
        try:
            self.sync_names(path.parent)
        except BaseException:
            self.remove(path)
            raise
        return size

    def sync_file(self, path: Path) -> int:
        """Make what a file holds durable; return its size."""
        with path.open("rb") as written:
            os.fsync(written.fileno())
            return os.fstat(written.fileno()).st_size

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name."""
        path.rename(to)

    def sync_names(self, directory: Path) -> None:
        """Make the names of the files in a directory durable, if its file system can do so."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def written_at(self, path: Path) -> float:
        """Return when a file was last written to, in seconds since 1970."""
        return path.stat().st_mtime

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a database, whose transactions are durable as soon as they are committed."""
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite gives its mode to the files next to it
        database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
        except BaseException:
            database.close()
            raise
        return database
