"""The files and batches of a server, as OpenAI's API describes them.

    files/ID.json      a file's description
    files/ID           its content
    batches/ID.json    a batch as a client asked for it
    cancelled/ID.json  when a client cancelled it
    states/ID.json     how far it is, from the process that answers it
    answers/ID/*       its answers, in the order of their names

Every object has one writer, so clients, replicas and that process need no lock.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from diffray.cluster.api.errors import ApiError, Json, invalid
from diffray.cluster.api.object_store import ObjectStore

ENDED: Final = ("completed", "failed", "expired", "cancelled")
OUTPUT: Final = "batch_output"  # the purpose of files that batches write
_ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{28}(-output|-errors)?")
_TIMES: Final = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


class BatchStore:
    """Identifiers grow with time, so that sorted names are in the order of their creation."""

    def __init__(self, place: str) -> None:
        self.objects = ObjectStore(place)

    # Files.

    def add_file(self, filename: str, purpose: str, source: BinaryIO, name: str = "") -> Json:
        """Store a file, under a new identifier if `name` is none."""
        name = name or _new("file-")
        size = source.seek(0, 2)
        source.seek(0)
        self.objects.upload(f"files/{name}", source)
        about = {
            "id": name, "object": "file", "bytes": size, "created_at": int(time.time()),
            "filename": filename, "purpose": purpose, "status": "processed", "expires_at": None,
        }  # fmt: skip
        self._write(f"files/{name}.json", about)
        return about

    def file(self, name: str) -> Json:
        if (found := self._read(f"files/{_checked(name)}.json")) is None:
            raise _missing("file", name)
        return found

    def content(self, name: str) -> Iterator[bytes]:
        self.file(name)
        return self.objects.chunks(f"files/{name}")

    def delete_file(self, name: str) -> Json:
        """Delete a file, unless a batch still needs it."""
        if self.file(name)["purpose"] != OUTPUT:
            for each in self.batches():
                with suppress(ValueError):  # a damaged batch needs nothing
                    batch = self.batch(each)
                    if batch["input_file_id"] == name and batch["status"] not in ENDED:
                        message = f"batch {each} still needs the file; cancel it first"
                        raise invalid(message, "file_id")
        self.objects.delete(f"files/{name}.json")
        self.objects.delete(f"files/{name}")
        return {"id": name, "object": "file", "deleted": True}

    def files(self) -> list[str]:
        """Return the identifiers of all files, the oldest first."""
        return self._described("files")

    # Batches.

    def add_batch(self, asked: Json, seconds: int) -> Json:
        """Store a batch that ends within these seconds."""
        if (file := self._read(f"files/{_checked(asked['input_file_id'])}.json")) is None:
            raise invalid(f"there is no file {asked['input_file_id']}", "input_file_id")
        if file["purpose"] != "batch":
            raise invalid("the file's purpose is not batch", "input_file_id")
        name, now = _new("batch_"), int(time.time())
        made = {"id": name, "object": "batch"} | asked
        self._write(f"batches/{name}.json", made | {"created_at": now, "expires_at": now + seconds})
        return self.batch(name)

    def batch(self, name: str) -> Json:
        """Return a batch as clients see it."""
        if (asked := self._read(f"batches/{_checked(name)}.json")) is None:
            raise _missing("batch", name)
        found: Json = {
            "errors": None, "status": "validating", "output_file_id": None, "error_file_id": None,
            **dict.fromkeys(_TIMES), "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        found = asked | found | (self._read(f"states/{name}.json") or {})
        if found["status"] not in ENDED and (cancel := self._read(f"cancelled/{name}.json")):
            found |= {"status": "cancelling", **cancel}
        return found

    def batches(self) -> list[str]:
        """Return the identifiers of all batches, the oldest first."""
        return self._described("batches")

    def cancel(self, name: str) -> Json:
        """Ask for a batch's end."""
        status = self.batch(name)["status"]
        if status in ENDED:
            raise invalid(f"the batch has ended already: it is {status}")
        if status != "cancelling":
            self._write(f"cancelled/{name}.json", {"cancelling_at": int(time.time())})
        return self.batch(name)

    def is_cancelled(self, name: str) -> bool:
        return self._read(f"cancelled/{name}.json") is not None

    # For the process that answers batches.

    def write_state(self, name: str, state: Json) -> None:
        self._write(f"states/{name}.json", state)

    def add_answers(self, name: str, lines: list[str]) -> None:
        part = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        content = "".join(f"{line}\n" for line in lines).encode()
        self.objects.write(f"answers/{name}/{part}", content)

    def answers(self, name: str) -> Iterator[Json]:
        """Yield the answers of a batch, one for each request."""
        seen = set()
        folder = f"answers/{name}"
        for part in self.objects.names(folder):
            for line in (self.objects.read(f"{folder}/{part}") or b"").split(b"\n")[:-1]:
                try:
                    answer = json.loads(line)
                except ValueError:  # damaged, so it is asked again
                    continue
                if answer["custom_id"] not in seen:  # a process that was replaced may answer too
                    seen.add(answer["custom_id"])
                    yield answer

    def forget_answers(self, name: str) -> None:
        self.objects.delete(f"answers/{name}")

    def download(self, name: str, target: Path) -> None:
        self.objects.download(f"files/{name}", target)

    def _described(self, folder: str) -> list[str]:
        names = self.objects.names(folder)
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _read(self, name: str) -> Json | None:
        found = self.objects.read(name)
        return None if found is None else dict(json.loads(found))

    def _write(self, name: str, value: Json) -> None:
        self.objects.write(name, json.dumps(value).encode())


def _new(prefix: str) -> str:
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(6)}"


def is_identifier(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def _checked(name: str) -> str:
    """Return an identifier from a client, unless it could lead elsewhere."""
    return name if is_identifier(name) else "none"


def _missing(kind: str, name: str) -> ApiError:
    return ApiError(404, f"There is no {kind} {name[:100]}.", code="not_found")
