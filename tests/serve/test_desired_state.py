"""All replicas of a deployment get what an operator wants, also those that come later."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from diffray.cluster.api.operations import LoadAdapter, UnloadAdapter
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.weight_changes import EngineChange, Sleep, UpdateWeights
from diffray.cluster.serve.desired_state import DesiredState, EveryReplica, Record
from diffray.components.checkpoints.update import check_folder
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.trainer_orders import JoinTrainer, Received, ReceiveWeights, TrainerOrder
from tests.helpers.adapters import Story
from tests.helpers.recorder import Recorder
from tests.helpers.tiny import tiny_checkpoint

RANKS = 2  # of each replica
pytestmark = pytest.mark.usefixtures("stored")


class Engine(Recorder):
    refuses = ""

    async def apply(self, change: EngineChange) -> str:
        await asyncio.sleep(0.001)
        if self.refuses and isinstance(change, UpdateWeights):
            raise ValueError(self.refuses)
        return await super().apply(change)

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        if self.refuses:
            raise ValueError(self.refuses)
        return await super().ask_trainer(order)


class Deployment:
    def __init__(self, count: int, model: str | None = None) -> None:
        self.model = model
        self.record = Record("some")
        self.wrong: dict[str, str] = {}  # folders that do not fit, and why
        self.engines: list[Engine] = []
        self.adapters: list[LoadedAdapters] = []
        self.replicas: list[EveryReplica] = []
        self.deaf: set[int] = set()  # replicas that no message reaches
        for _ in range(count):
            self.start()

    def start(self) -> EveryReplica:
        engine = Engine()
        peers: Any = self
        client: Any = engine
        adapters = LoadedAdapters(self.model, reserved=("base",))
        own = f"replica {len(self.replicas)}"
        made = EveryReplica(client, adapters, peers, self.record, self._check, 1.0, own, RANKS)
        self.adapters.append(adapters)
        self.engines.append(engine)
        self.replicas.append(made)
        return made

    def _check(self, source: str) -> None:
        if source in self.wrong:
            raise ValueError(self.wrong[source])

    async def ask(self, _: str, method: str, *given: Any, within: float) -> list[Any]:
        heard = [each for at, each in enumerate(self.replicas) if at not in self.deaf]
        return list(await asyncio.gather(*(getattr(each, method)(*given) for each in heard)))


async def test_all_replicas_get_new_weights_and_later_ones_the_newest() -> None:
    found = Deployment(3)
    first, second, _ = found.replicas
    assert await first.apply(UpdateWeights("/a")) == "1"
    assert await second.apply(UpdateWeights("/b", "restart", "step 2")) == "step 2"
    assert await first.apply(UpdateWeights("/c")) == "3"
    made = [("/a", "finish", "1"), ("/b", "restart", "step 2"), ("/c", "finish", "3")]
    assert [engine.updates for engine in found.engines] == [made] * 3
    late = found.start()
    assert await late.catch_up() == ""
    assert found.engines[-1].updates == made[-1:]
    assert await late.catch_up() == "" and len(found.engines[-1].updates) == 1
    with pytest.raises(ValueError, match="already have version 3"):
        await late.apply(UpdateWeights("/d", version="3"))


async def test_a_replica_without_messages_reads_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffray.cluster.serve.desired_state._LOOK_S", 0.01)
    found = Deployment(2)
    found.deaf = {1}
    await found.replicas[0].apply(UpdateWeights("/a"))
    assert found.engines[1].updates == []
    looking = asyncio.create_task(found.replicas[1].keep_up())
    async with asyncio.timeout(60):
        while not found.engines[1].updates:
            await asyncio.sleep(0.01)
    looking.cancel()
    assert found.engines[1].updates == found.engines[0].updates


async def test_operators_at_two_replicas_agree(stored: dict[bytes, bytes]) -> None:
    found = Deployment(3)
    names = [f"v{at}" if at % 2 else None for at in range(9)]
    made = await asyncio.gather(
        *(
            found.replicas[at % 3].apply(UpdateWeights(f"/{at}", version=name))
            for at, name in enumerate(names)
        )
    )
    assert len({*made}) == len(stored) == 9
    (last,) = {engine.updates[-1] for engine in found.engines}
    newest = await found.record.newest()
    assert last == (newest.source, newest.in_flight, newest.version)
    assert await Record("other").newest() == DesiredState()


async def test_a_replica_that_cannot_have_them_is_not_healthy() -> None:
    """Until it can have what is wanted then."""
    found = Deployment(2)
    found.engines[1].refuses = "there is no folder '/a'"
    with pytest.raises(EngineFailed, match="no folder '/a'; that replica is being replaced"):
        await found.replicas[0].apply(UpdateWeights("/a"))
    assert [bool(each.failure) for each in found.replicas] == [False, True]
    assert "weights 1: there is no folder" in await found.replicas[1].catch_up()
    found.engines[1].refuses = ""
    await found.replicas[0].apply(UpdateWeights("/b"))
    assert [each.failure for each in found.replicas] == ["", ""]


async def test_all_replicas_sleep_and_those_that_start_meanwhile_too() -> None:
    found = Deployment(2)
    await found.replicas[0].apply(UpdateWeights("/a"))
    await found.replicas[1].apply(Sleep(2))
    assert (await found.replicas[0].load()).sleep_level == 2
    assert await found.start().catch_up() == ""
    await found.replicas[0].apply(UpdateWeights("/b"))
    assert [engine.level for engine in found.engines] == [2, 2, 2]
    assert {engine.updates[-1][0] for engine in found.engines} == {"/b"}
    await found.replicas[2].apply(Sleep(0))
    assert [engine.level for engine in found.engines] == [0, 0, 0]
    assert len(found.engines[0].updates) == 2


async def test_all_replicas_know_the_adapters_that_are_loaded(tmp_path: Path) -> None:
    """Each load has its own number, so that no K/V of the one before are read."""
    story = Story(tmp_path)
    found = Deployment(2, str(story.base))
    first, second = found.replicas
    await asyncio.gather(
        *(
            found.replicas[at].apply(LoadAdapter(f"a{at}", story.adapters[f"a{at}"]))
            for at in (0, 1)
        )
    )
    assert [{*each.names} for each in found.adapters] == [{"a0", "a1"}] * 2
    before = found.adapters[0].find("a0")
    await second.apply(UnloadAdapter("a0"))
    await first.apply(LoadAdapter("a0", story.adapters["a2"]))
    late = found.start()
    assert await late.catch_up() == ""
    assert found.adapters[2].all == found.adapters[0].all == found.adapters[1].all
    assert found.adapters[2].find("a0").number > before.number
    for name, path, words in (
        ("a0", story.adapters["a1"], "'a0' is loaded; unload it first"),
        ("base", story.adapters["a1"], "'base' cannot be an adapter's name"),
        ("other", str(story.base), "has no adapter_config.json"),
    ):
        with pytest.raises(ValueError, match=words):
            await first.apply(LoadAdapter(name, path))
    with pytest.raises(ValueError, match="no adapter 'other' is loaded"):
        await first.apply(UnloadAdapter("other"))
    loaded = found.adapters[1].all
    await second.apply(LoadAdapter("a1", story.adapters["a1"]))  # again, as after a lost answer
    assert [each.all for each in found.adapters] == [loaded] * 3
    assert {*found.adapters[1].names} == {"a0", "a1"}


SENT = TrainerOrder("g", receive=ReceiveWeights(["head"], ["float32"], [[64, 16]], 7))


def joining(replicas: int) -> TrainerOrder:
    return TrainerOrder("g", JoinTrainer("host", 1, 1, 1 + RANKS * replicas, "gloo"))


async def test_all_replicas_take_their_ranks_of_a_trainer_s_group() -> None:
    """A later one has the folder; without one of the members nothing changes."""
    found = Deployment(2)
    first, second = found.replicas
    with pytest.raises(ValueError, match="no replica is in a group 'g'"):
        await first.ask_trainer(SENT)
    with pytest.raises(ValueError, match="world_size is 3, but must be 5 for ranks from 1 on"):
        await first.ask_trainer(joining(1))
    await second.ask_trainer(joining(2))
    joined: list[Any] = [engine.orders for engine in found.engines]
    assert [each.join.rank for (each,) in joined] == [1, 1 + RANKS]
    late = found.start()
    assert (await late.ask_trainer(SENT)).folder == "/received"
    assert await late.apply(UpdateWeights("/received")) == "1"
    assert found.engines[2].orders == []
    assert [engine.updates[-1][0] for engine in found.engines] == ["/received"] * 3
    for engine in found.engines[:2]:
        engine.refuses = "1 unexpected: tail"
    with pytest.raises(ValueError, match="tail"):
        await late.ask_trainer(SENT)
    found.engines[0].refuses = ""
    with pytest.raises(ValueError, match="tail"):  # by one of them alone: the others leave
        await late.ask_trainer(SENT)
    assert found.engines[0].orders[-1] == TrainerOrder("g")
    found.engines[1].refuses = ""
    with pytest.raises(ValueError, match="no replica is in a group 'g'"):
        await first.ask_trainer(SENT)
    await first.ask_trainer(joining(3))
    found.deaf = {1}
    with pytest.raises(ValueError, match="ranks were lost, and the group 'g' with them"):
        await first.ask_trainer(SENT)
    assert found.engines[0].orders[-1] == TrainerOrder("g")


async def test_misfits_and_what_reaches_none_are_not_desired(stored: dict[bytes, bytes]) -> None:
    found = Deployment(2)
    found.wrong["/b"] = "head is [3, 4], not [64, 16]"
    with pytest.raises(ValueError, match="head is"):
        await found.replicas[0].apply(UpdateWeights("/b"))
    found.deaf = {0, 1}
    with pytest.raises(EngineFailed, match="no replica answered"):
        await found.replicas[0].apply(UpdateWeights("/a"))
    assert stored == {} and [engine.updates for engine in found.engines] == [[], []]
    await found.replicas[0].apply(Sleep(1))
    assert found.engines[0].level == 1, "it reaches itself"


def test_a_folder_is_checked_against_the_model_s(tmp_path: Path) -> None:
    model = Path(tiny_checkpoint(tmp_path / "model"))
    check_folder(model, "auto", str(model))
    with pytest.raises(ValueError, match="another model"):
        check_folder(model, "float32", tiny_checkpoint(tmp_path / "other", "llada2_moe"))
    short = shutil.copytree(model, tmp_path / "short")
    (file,) = short.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=file.name):
        check_folder(model, "float32", str(short))
