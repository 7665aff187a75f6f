"""Objects in a folder, or at a URL that fsspec knows, such as s3://bucket/path."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

_CHUNK: Final = 2**20
_INCOMPLETE: Final = ".part"


class ObjectStore:
    """An object is written as a whole: a reader finds all of it, or nothing."""

    def __init__(self, place: str) -> None:
        try:
            # Other processes write here too, so listings must not be remembered.
            self._system, self._root = url_to_fs(place, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from None
        self._is_local = isinstance(self._system, LocalFileSystem)

    def read(self, name: str) -> bytes | None:
        """Return an object, or None if there is none."""
        try:
            return bytes(self._system.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._system.open(self._at(name), "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def download(self, name: str, target: Path) -> None:
        """Copy an object into a local file; raise FileNotFoundError if there is none."""
        self._system.get_file(self._at(name), str(target))

    def write(self, name: str, content: bytes) -> None:
        self.upload(name, BytesIO(content))

    def upload(self, name: str, source: BinaryIO) -> None:
        target = written = self._at(name)
        if self._is_local:  # other systems show an object when it is complete
            written = f"{target}.{uuid4().hex}{_INCOMPLETE}"
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._system.open(written, "wb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
            if self._is_local:
                os.replace(written, target)
        except BaseException:
            if self._is_local:
                Path(written).unlink(missing_ok=True)
            raise

    def names(self, folder: str) -> list[str]:
        """Return the names of a folder's objects and folders, sorted."""
        try:
            found = self._system.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (str(each).rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if not name.endswith(_INCOMPLETE))

    def delete(self, name: str) -> None:
        """Delete an object or a folder, if there is one."""
        with suppress(FileNotFoundError):
            self._system.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"
