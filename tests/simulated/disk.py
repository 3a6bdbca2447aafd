"""A disk that is full, fails and is slow for a while, and keeps only what is durable when the power fails. Its files are real, in a temporary directory."""

import errno
import os
import random
import sqlite3
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

from weir.jobs.store import Disk


class Killed(BaseException):
    """The process ends here, and does nothing more."""


class Storage:
    """What survives the process. `clock` is the wall clock."""

    def __init__(self, directory: Path, draw: random.Random, clock: Callable[[], float]) -> None:
        self.directory, self.draw, self.clock = directory, draw, clock
        self.full = self.fails = False
        self.operations = 0  # after so many the process is killed; 0: it is not
        self.patient = False  # none of them counts now
        self.durable: dict[Path, int] = {}  # how much of each file
        self.named: set[Path] = set()  # the names that are durable
        self.written: dict[Path, float] = {}

    def lose_power(self) -> None:
        """Lose some of what is not durable: it may have been written."""
        for path in sorted(self.directory.iterdir(), key=lambda path: self.written.get(path, 0.0)):
            if path not in self.named and self.draw.random() < 0.7:
                path.unlink()
            elif (size := path.stat().st_size) > (durable := self.durable.get(path, 0)):
                os.truncate(path, self.draw.randint(durable, size))


class _File(FileIO):
    """A file without a buffer: what was written to it survives the process."""

    disk: "SimulatedDisk"

    def write(self, data: Any) -> int:
        """See BinaryIO."""
        storage = self.disk.storage
        self.disk.step()
        storage.written[Path(str(self.name))] = storage.clock()
        if storage.full:
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


class _Database(sqlite3.Connection):
    """SQLite keeps a transaction once it is committed, whatever happens then. It does not end one that has failed."""

    disk: "SimulatedDisk"

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        """See sqlite3."""
        storage, what = self.disk.storage, sql.partition(" ")[0]
        if what in ("SELECT", "ROLLBACK"):
            self.disk.check()
            return super().execute(sql, *parameters)
        self.disk.step()
        if storage.full and what in ("INSERT", "UPDATE", "COMMIT"):
            raise sqlite3.OperationalError("database or disk is full")
        if storage.fails and what == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        done = super().execute(sql, *parameters)
        self.disk.step()
        return done


class SimulatedDisk(Disk):
    """The disk as one process sees it. `killed` is called when that is to end in the middle of what it does."""

    def __init__(self, storage: Storage, killed: Callable[[], None]) -> None:
        self.storage = storage
        self._killed = killed
        self._dead = False
        self._open: list[BinaryIO | _Database] = []

    def check(self) -> None:
        """Raise Killed if the process has ended."""
        if self._dead:
            raise Killed

    def step(self) -> None:
        """The process does something to the disk. Raises Killed."""
        self.check()
        if self.storage.operations and not self.storage.patient:
            self.storage.operations -= 1
            if not self.storage.operations:
                self._killed()
                raise Killed

    def _may_fail(self) -> None:
        self.step()
        if self.storage.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def die(self) -> None:
        """The process has ended, and with it what it had open."""
        self._dead = True
        for each in self._open:
            each.close()  # of a database, what was not committed is not kept

    def create(self, path: Path, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
        """See Disk."""
        self.step()
        file: Any = _File(path, mode)
        file.disk = self
        self._open.append(file)  # it is closed when its process ends
        self.storage.written[path] = self.storage.clock()
        return file  # type: ignore[no-any-return]  # a FileIO is no BinaryIO for mypy

    def sync_file(self, path: Path) -> int:
        """See Disk."""
        self._may_fail()
        self.storage.durable[path] = path.stat().st_size
        return self.storage.durable[path]

    def rename(self, path: Path, to: Path) -> None:
        """See Disk."""
        self.step()
        super().rename(path, to)
        self.storage.durable[to] = self.storage.durable.pop(path, 0)
        self.storage.written[to] = self.storage.written.get(path, 0.0)

    def sync_names(self, directory: Path) -> None:
        """See Disk."""
        self._may_fail()
        self.storage.named.update(directory.iterdir())

    def remove(self, path: Path) -> None:
        """See Disk."""
        self.step()
        super().remove(path)
        self.storage.named.discard(path)
        self.storage.durable.pop(path, None)

    def written_at(self, path: Path) -> float:
        """See Disk."""
        path.stat()
        return self.storage.written[path]

    def connect(self, path: Path) -> sqlite3.Connection:
        """See Disk."""
        self.step()
        database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, factory=_Database)
        database.disk = self
        self._open.append(database)
        sqlite3.Connection.execute(database, "PRAGMA journal_mode=WAL")
        sqlite3.Connection.execute(database, "PRAGMA synchronous=OFF")
        return database
