"""/v1/files and /v1/batches: what clients upload and get, and how batches are answered."""

import asyncio
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from diffray.cluster.api import batch_runner, running_batch
from diffray.cluster.api.batch_runner import BatchRunner, Room
from diffray.cluster.api.batch_store import BatchStore
from diffray.cluster.api.bodies import GenerationBody
from diffray.cluster.api.errors import ApiError, Json, invalid, unavailable
from diffray.cluster.api.object_store import ObjectStore
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import Load
from tests.helpers.api_server import Served, serve

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


class Models:
    """Answers a prompt with itself; prompts say what else happens."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.slots = 4
        self.running = self.most = 0
        self.open = asyncio.Event()

    async def load(self, name: str | None) -> Load:
        return Load(slots=self.slots, running=self.running)

    async def whole(self, kind: type[GenerationBody], given: object, *, background: bool) -> Json:
        assert background and isinstance(given, dict)
        body = given
        prompt = str(body["prompt"])
        self.asked[prompt] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._happen(prompt)
        finally:
            self.running -= 1
        return {"id": f"cmpl-{prompt}", "choices": [{"text": prompt}]}

    async def _happen(self, prompt: str) -> None:
        await asyncio.sleep(0)
        match prompt.split():
            case ["wait", *_]:
                await self.open.wait()
            case ["refuse", *_]:
                raise invalid("no")
            case ["bug", *_]:
                raise ZeroDivisionError
            case ["away", *_] if self.asked[prompt] < 5:
                raise unavailable("the model is being loaded")
            case ["late", *_]:
                raise ApiError(504, "too late")


def lines(*prompts: str, url: str = COMPLETE) -> bytes:
    asked = (
        {"custom_id": f"q{n}", "method": "POST", "url": url, "body": {"prompt": prompt}}
        for n, prompt in enumerate(prompts)
    )
    return "".join(json.dumps(each) + "\n" for each in asked).encode()


def begin(store: BatchStore, content: bytes, seconds: int = 3600, url: str = COMPLETE) -> str:
    """Upload a file and ask for its answers."""
    file = store.add_file("in.jsonl", "batch", io.BytesIO(content))
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "1h"}
    return str(store.add_batch(asked, seconds)["id"])


async def until(store: BatchStore, name: str, *statuses: str) -> Json:
    """Wait for one of the statuses."""
    for _ in range(2000):
        if (batch := store.batch(name))["status"] in statuses:
            return batch
        await asyncio.sleep(0.005)
    raise AssertionError(f"the batch stays {batch}")


async def answered(store: BatchStore, name: str, count: int) -> None:
    """Wait until so many requests have an answer."""
    for _ in range(2000):
        if store.batch(name)["request_counts"]["completed"] >= count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"no {count} answers")


def answers(store: BatchStore, batch: Json) -> dict[str, Json]:
    """Return the answers in the batch's files by the id of their request, each once."""
    found = {}
    for field in ("output_file_id", "error_file_id"):
        if batch[field]:
            for line in b"".join(store.content(batch[field])).splitlines():
                answer = json.loads(line)
                assert answer["custom_id"] not in found
                right = (answer["response"] or {}).get("status_code") == 200
                assert right == (field == "output_file_id")
                found[answer["custom_id"]] = answer
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_RETRY_S"):
        monkeypatch.setattr(batch_runner, name, 0.01)
    monkeypatch.setattr(running_batch, "_STORE_S", 0.01)
    monkeypatch.setattr(batch_runner, "pause", lambda attempt, seconds: 0)
    monkeypatch.setattr("diffray.cluster.api.batch_lines.pause", lambda attempt, seconds: 0)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(str(tmp_path / "kept"))


@contextmanager
def started(store: BatchStore, models: Models) -> Iterator[asyncio.Task[None]]:
    settings = ApiSettings(max_body_bytes=1000)
    running = asyncio.create_task(BatchRunner(store, models, settings).run())
    try:
        yield running
    finally:
        running.cancel()


def test_every_request_is_answered_once_behind_all_others(store: BatchStore) -> None:
    async def run() -> None:
        models = Models()
        prompts = [f"hello {n}" for n in range(60)] + ["refuse", "bug", "away", "late"]
        with started(store, models):
            name = begin(store, lines(*prompts))
            batch = await until(store, name, *ENDED)
            while store.objects.names(f"answers/{name}"):
                await asyncio.sleep(0.005)
        assert batch["status"] == "completed" and batch["completed_at"] >= batch["in_progress_at"]
        assert batch["request_counts"] == {"total": 64, "completed": 61, "failed": 3}
        found = answers(store, batch)
        assert set(found) == {f"q{n}" for n in range(64)}
        for n, prompt in enumerate(prompts):
            reply = found[f"q{n}"]["response"]
            if reply["status_code"] == 200:
                assert reply["body"]["choices"] == [{"text": prompt}]
        status = [found[f"q{n}"]["response"]["status_code"] for n in range(60, 64)]
        assert status == [400, 500, 200, 504]
        assert [models.asked[each] for each in prompts[60:]] == [1, 1, 5, 3]
        assert models.asked["hello 7"] == 1 and models.most <= 4

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        (lines("a") + b"{", 2, "not valid JSON"),
        (lines("a") * 2, 2, "custom_id 'q0' is already used in line 1"),
        (lines("a", url=CHAT), 1, f"url is {CHAT}, but the batch's is {COMPLETE}"),
        (b"[" * 100_000, 1, "not valid JSON"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}', 1, "url"),
        (b"\n", None, "no requests"),
        (b"\n\n" + lines("a" * 2000), 3, "larger than 1000 bytes"),
    ],
)
def test_a_file_with_a_mistake_fails_before_anything_is_asked(
    store: BatchStore, content: bytes, line: int | None, said: str
) -> None:
    async def run() -> None:
        models = Models()
        with started(store, models):
            batch = await until(store, begin(store, content), *ENDED)
        (error,) = batch["errors"]["data"]
        assert batch["status"] == "failed" and batch["failed_at"]
        assert error["line"] == line and said in error["message"]
        assert not models.asked

    asyncio.run(run())


def test_what_another_process_began_is_continued(store: BatchStore) -> None:
    """Stored answers are not asked for again; what was in flight is."""

    async def run() -> None:
        first, second = Models(), Models()
        prompts = ["a", "b", "wait c", "d", "wait e", "f"]
        with started(store, first) as running:
            name = begin(store, lines(*prompts))
            await answered(store, name, 4)
        await asyncio.gather(running, return_exceptions=True)
        assert store.batch(name)["status"] == "in_progress"
        # What a process that was replaced writes late counts once.
        doubled = json.loads(next(iter_lines(store, name)))
        store.add_answers(name, [json.dumps(doubled)])
        second.open.set()
        with started(store, second):
            batch = await until(store, name, *ENDED)
        assert second.asked == Counter(["wait c", "wait e"])
        assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert set(answers(store, batch)) == {f"q{n}" for n in range(6)}

    asyncio.run(run())


def iter_lines(store: BatchStore, name: str) -> Iterator[bytes]:
    folder = f"answers/{name}"
    for part in store.objects.names(folder):
        yield from (store.objects.read(f"{folder}/{part}") or b"").splitlines()


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_ends_early_keeps_its_answers(store: BatchStore, end: str) -> None:
    async def run() -> None:
        models = Models()
        with started(store, models):
            seconds = 3 if end == "expired" else 3600
            name = begin(store, lines("a", "wait b", "c", "wait d"), seconds)
            await answered(store, name, 2)
            if end == "cancelled":
                assert store.cancel(name)["status"] == "cancelling"
                store.cancel(name)
            batch = await until(store, name, *ENDED)
        assert batch["status"] == end and batch[f"{end}_at"]
        assert (batch["cancelling_at"] is not None) == (end == "cancelled")
        found = answers(store, batch)
        assert {key for key, each in found.items() if each["error"] is None} == {"q0", "q2"}
        assert {found[key]["error"]["code"] for key in ("q1", "q3")} == {f"batch_{end}"}
        with pytest.raises(ApiError, match="already"):
            store.cancel(name)

    asyncio.run(run())


def test_a_batch_whose_store_fails_is_tried_again(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        models, failures = Models(), iter([OSError("full"), OSError("full")])
        write = store.add_answers

        def add_answers(name: str, kept: list[str]) -> None:
            for failure in failures:
                raise failure
            write(name, kept)

        monkeypatch.setattr(store, "add_answers", add_answers)
        with started(store, models):
            batch = await until(store, begin(store, lines("a", "b")), *ENDED)
        assert batch["status"] == "completed" and set(answers(store, batch)) == {"q0", "q1"}
        assert models.asked == Counter({"a": 3, "b": 3})

    asyncio.run(run())


def test_of_two_processes_one_ends_a_batch(store: BatchStore) -> None:
    """During an upgrade the old one may run on; it must not replace what the new one wrote."""

    async def run() -> None:
        old, new = Models(), Models()
        with started(store, old):
            name = begin(store, lines("a", "b", "wait c"))
            await answered(store, name, 2)
            new.open.set()
            with started(store, new):
                batch = await until(store, name, *ENDED)
                old.open.set()
                await asyncio.sleep(0.2)
        assert old.asked["wait c"] == new.asked["wait c"] == 1
        assert store.batch(name) == batch and batch["status"] == "completed"
        assert set(answers(store, batch)) == {"q0", "q1", "q2"}

    asyncio.run(run())


def test_damaged_and_deleted_objects_stop_no_other_batch(store: BatchStore) -> None:
    async def run() -> None:
        models = Models()
        damaged, torn, deleted = (begin(store, lines("a", "wait b")) for _ in range(3))
        store.objects.write(f"states/{damaged}.json", b"")
        store.objects.write(f"answers/{torn}/1", b"\0\0\n")
        with started(store, models) as running:
            await answered(store, deleted, 1)
        await asyncio.gather(running, return_exceptions=True)
        with pytest.raises(ApiError, match="still needs"):
            store.delete_file(store.batch(deleted)["input_file_id"])
        store.objects.delete(f"files/{store.batch(deleted)['input_file_id']}")
        models.open.set()
        with started(store, models):
            batch = await until(store, torn, *ENDED)
            assert batch["status"] == "completed" and set(answers(store, batch)) == {"q0", "q1"}
            batch = await until(store, deleted, *ENDED)
            assert batch["status"] == "failed" and set(answers(store, batch)) == {"q0"}
            assert "deleted" in batch["errors"]["data"][0]["message"]
        with pytest.raises(ValueError, match="Expecting value"):
            store.batch(damaged)

    asyncio.run(run())


def test_a_batch_that_cannot_be_answered_ends_with_its_time(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Iterator[Json]:
        raise PermissionError("not for you")

    async def run() -> None:
        monkeypatch.setattr(store, "answers", broken)
        with started(store, Models()):
            batch = await until(store, begin(store, lines("a"), seconds=1), *ENDED)
        assert batch["status"] == "failed" and "not for you" in str(batch["errors"])

    asyncio.run(run())


def test_batches_take_the_room_that_others_leave() -> None:
    async def run() -> None:
        room = Room()
        for load, limit in [
            (Load(slots=8), 8),
            (Load(slots=8, running=3), 5),
            (Load(slots=8, running=8, waiting=9), 1),
            (Load(), 1),  # no replica runs
            (Load(slots=16, running=2), 14),
        ]:
            await room.follow(load)
            assert room.limit == limit
        async with room.taken(), room.taken():
            await room.follow(Load(slots=8, running=2, waiting=1))
            assert room.limit == 7  # two of the three are a batch's

    asyncio.run(run())


def test_an_object_is_whole_or_not_there(tmp_path: Path) -> None:
    for place in (str(tmp_path / "kept"), "memory://kept"):
        objects = ObjectStore(place)
        assert objects.read("a/b") is None and objects.names("a") == []
        objects.write("a/b", b"one")
        objects.write("a/b", b"two")
        assert objects.read("a/b") == b"two" and objects.names("a") == ["b"]
        objects.delete("a")
        objects.delete("a")
        assert objects.read("a/b") is None
    with pytest.raises(ValueError, match="nowhere://x"):
        ObjectStore("nowhere://x")

    class Breaking(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("the client is gone")

    objects = ObjectStore(str(tmp_path / "kept"))
    with pytest.raises(OSError, match="gone"):
        objects.upload("a/c", Breaking())
    assert objects.read("a/c") is None and objects.names("a") == []


# Over HTTP.


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> BatchStore:
    return BatchStore(str(tmp_path_factory.mktemp("kept")))


@pytest.fixture(scope="module")
def url(tiny: Served, kept: BatchStore) -> Iterator[str]:
    place = kept.objects._root
    with serve(tiny.service, ApiSettings(files=place, max_file_bytes=100_000)) as url:
        yield url


def test_openai_client_answers_a_file(url: str, kept: BatchStore) -> None:
    models = Models()

    def work() -> None:
        async def run() -> None:
            with started(kept, models) as running, pytest.raises(asyncio.CancelledError):
                ending = asyncio.create_task(asyncio.to_thread(ended.wait, 60))
                await asyncio.wait([ending])
                running.cancel()
                await running

        asyncio.run(run())

    ended = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", lines("a", "refuse")), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"night": "1"},
        )
        assert batch.metadata == {"night": "1"}
        assert batch.expires_at == batch.created_at + 24 * 3600
        while batch.status not in ENDED:
            time.sleep(0.01)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        assert batch.output_file_id and batch.error_file_id
        output = json.loads(client.files.content(batch.output_file_id).text)
        assert output["response"]["body"]["choices"] == [{"text": "a"}]
        assert client.files.retrieve(file.id).filename == "in.jsonl"
        assert {each.id for each in client.files.list(purpose="batch_output")} == {
            batch.output_file_id,
            batch.error_file_id,
        }
        with pytest.raises(openai.BadRequestError, match="ended already"):
            client.batches.cancel(batch.id)
        more = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert [each.id for each in client.batches.list(limit=1)] == [more.id, batch.id]
        while client.batches.retrieve(more.id).status not in ENDED:
            time.sleep(0.01)
        for each in client.files.list(limit=1):  # of a list that becomes shorter meanwhile
            assert client.files.delete(each.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
    finally:
        ended.set()
        worker.join()


def refused(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_what_is_wrong_with_a_request_is_said(url: str) -> None:
    batch = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
    with httpx2.Client(base_url=url) as http:

        def upload(content: bytes = b"{}", headers: Any = None, **form: str) -> tuple[int, str]:
            files = {"file": ("in.jsonl", content)}
            return refused(http.post("/v1/files", data=form, files=files, headers=headers))

        assert upload(purpose="fine-tune")[0] == 400
        assert "purpose" in upload()[1]
        assert upload(purpose="batch", expires_after="1")[1].startswith("expires_after")
        assert upload(purpose="batch", headers={"Origin": "http://["})[0] == 403
        assert upload(b"x" * 300_000, purpose="batch")[0] == 413
        status, said = upload(purpose="batch", headers={"Origin": "https://elsewhere.example"})
        assert status == 403 and "https://elsewhere.example" in said
        assert refused(http.post("/v1/files", json={}))[0] == 400
        other: Any = {"purpose": (None, "batch"), "other": ("a", b"b")}
        assert refused(http.post("/v1/files", files=other))[0] == 400
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({}, "input_file_id"),
            ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"priority": 1}, "priority"),
        ]
        for wrong, field in mistakes:
            answer = http.post("/v1/batches", json=batch | wrong)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field, wrong
        for path in ("/v1/files/file-x", "/v1/batches/..%2f..%2fetc", "/v1/files/x/content"):
            assert refused(http.get(path))[0] == 404
        for query in ("limit=0", "limit=many", "after=batch_x", "colour=red"):
            assert refused(http.get(f"/v1/batches?{query}"))[0] == 400


def test_a_server_without_a_place_for_files_says_so(tiny: Served) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1"):
        status, said = refused(httpx2.get(tiny.url + path))
        assert status == 404 and "--files" in said
