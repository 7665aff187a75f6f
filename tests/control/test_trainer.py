"""New weights from a trainer's process: whole, or not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from diffray import AsyncDiffusionLLM, DiffusionLLM
from diffray.cluster.api.settings import ApiSettings
from tests.helpers.api_server import serve, serve_model
from tests.helpers.short_answers import ids
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.tiny_checkpoints import LLADA, random_weights, save, shifted
from tests.helpers.trainer import Trainer, listing

pytestmark = pytest.mark.slow  # the first trainer has to load torch

OPTIONS: dict[str, Any] = {"dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("old") / "model", LLADA, random_weights(LLADA))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the model, in bfloat16."""
    weights = {name: each.bfloat16() for name, each in shifted(LLADA).items()}
    return save(tmp_path_factory.mktemp("new") / "model", LLADA, weights)


@pytest.fixture
def llm(old: Path, tmp_path: Path) -> Iterator[DiffusionLLM]:
    with DiffusionLLM(str(old), received_weights=str(tmp_path / "received"), **OPTIONS) as llm:
        yield llm


def file_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def join(llm: DiffusionLLM, trainer: Trainer, **options: Any) -> None:
    llm.init_weights_update_group(**trainer.group, rank_offset=1, world_size=2, **options)


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "received").iterdir())


def test_sent_weights_are_those_of_their_folder(
    llm: DiffusionLLM, new: Path, tmp_path: Path
) -> None:
    """In one call or several; between these nothing changes."""
    with DiffusionLLM(str(new), **OPTIONS) as fresh:
        expected = ids(fresh)
    before = ids(llm)
    assert before != expected
    with Trainer(file_of(new), 2) as trainer:
        join(llm, trainer)
        names = [*trainer.tensors]
        first, second = (
            listing({name: trainer.tensors[name] for name in part})
            for part in (names[:5], names[5:])
        )
        assert llm.update_weights_from_distributed(**first) is None
        assert ids(llm) == before
        assert llm.update_weights_from_distributed(**second, version="step 1") == "step 1"
        assert ids(llm) == expected
        whole = listing(trainer.tensors)
        assert [llm.update_weights_from_distributed(**whole) for _ in range(3)] == ["2", "3", "4"]
        assert ids(llm) == expected and len(folders(tmp_path)) == 2
        llm.sleep(2)
        llm.wake_up()
        assert ids(llm) == expected
        llm.destroy_weights_update_group()
        with pytest.raises(ValueError, match="in no group 'weight_update_group'"):
            llm.update_weights_from_distributed(**whole)


def test_what_is_not_the_model_s_is_refused_before_it_is_sent(
    llm: DiffusionLLM, new: Path, tmp_path: Path
) -> None:
    before = ids(llm)
    with Trainer(file_of(new), 2) as trainer:
        join(llm, trainer)
        with pytest.raises(ValueError, match="already exists; end it first"):
            join(llm, trainer)
        sent, some, *_ = trainer.tensors
        right = listing(trainer.tensors)
        for key, first, reason in (
            ("names", [], "give one of each for each tensor"),
            ("names", ["tail"], "1 unexpected: tail"),
            ("names", [some], f"named twice: {some}"),
            ("shapes", [[3, 4]], r"is \[3, 4\], not"),
            ("dtypes", ["int64"], "is int64"),
        ):
            with pytest.raises(ValueError, match=reason):
                llm.update_weights_from_distributed(**right | {key: [*first, *right[key][1:]]})
            assert ids(llm) == before
        part = listing({sent: trainer.tensors[sent]})
        assert llm.update_weights_from_distributed(**part) is None
        with pytest.raises(ValueError, match=f"arrived before, .* missing: {sent}"):
            llm.update_weights_from_distributed(**part)
    llm.destroy_weights_update_group()
    assert folders(tmp_path) == []


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_trainer_that_stops_leaves_the_old_weights(
    llm: DiffusionLLM, new: Path, tmp_path: Path, end: str
) -> None:
    before = ids(llm)
    with Trainer(file_of(new), 2, last=3 if end == "dies" else 0) as trainer:
        join(llm, trainer, timeout_s=60 if end == "dies" else 3)
        with pytest.raises(ValueError, match="did not arrive, so the old ones stay") as refused:
            llm.update_weights_from_distributed(**listing(trainer.tensors))
    assert "\n" not in str(refused.value)
    assert ids(llm) == before and folders(tmp_path) == []
    with pytest.raises(ValueError, match="in no group"):
        llm.update_weights_from_distributed(**listing(trainer.tensors))
    with Trainer(file_of(new), 2) as again:
        join(llm, again)
        assert llm.update_weights_from_distributed(**listing(again.tensors)) == "1"
    assert ids(llm) != before


def test_a_group_that_cannot_form_is_refused(old: Path, llm: DiffusionLLM, new: Path) -> None:
    with Trainer(file_of(new), 2) as trainer:
        given = trainer.group | {"rank_offset": 1, "world_size": 2}
        for options, reason in (
            ({"backend": "nccl"}, "nccl needs GPUs, but this engine runs on cpu"),
            ({"rank_offset": 0}, "1 ranks from 0 on do not fit a group of 2"),
            ({"rank_offset": 2}, "1 ranks from 2 on do not fit a group of 2"),
            ({"world_size": 3, "timeout_s": 1}, "did not form within 1 s"),
        ):
            with pytest.raises(ValueError, match=reason):
                llm.init_weights_update_group(**given | options)
        with (
            DiffusionLLM(str(old), **OPTIONS) as nowhere,
            pytest.raises(ValueError, match="set received_weights, a folder for a trainer's"),
        ):
            join(nowhere, trainer)


async def test_answers_that_have_begun_end_on_the_old_weights(
    llm: DiffusionLLM, old: Path, new: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "diffusion": {"block_length": 4}}
    root = str(tmp_path / "coroutines")
    with Trainer(file_of(new), 2) as trainer:
        async with AsyncDiffusionLLM(str(old), received_weights=root, **OPTIONS) as running:
            await running.init_weights_update_group(**trainer.group, rank_offset=1, world_size=2)
            begun = await running.submit([1, 2, 3], **asked)
            await begun.get()
            told = listing(trainer.tensors)
            assert await running.update_weights_from_distributed(**told) == "1"
            later = await running.submit([1, 2, 3], **asked)
            answers = [await begun.result(), await later.result()]
    for version, answer in enumerate(answers):
        (expected,) = llm.generate([[1, 2, 3]], use_tqdm=False, **asked)
        assert answer.weights_version == expected.weights_version == str(version)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        llm.update_weights(new)


def test_operators_have_a_server_s_weights_replaced(tmp_path: Path) -> None:
    """In two calls, at SGLang's paths; what cannot be is a 400 in one sentence."""
    old, new = (tiny_checkpoint(tmp_path / name) for name in ("old", "new"))
    file, key = file_of(Path(new)), {"Authorization": "Bearer operator"}
    save_file({name: each.flip(0).contiguous() for name, each in load_file(file).items()}, file)
    with (
        serve_model(old, "tiny", received_weights=str(tmp_path / "received")) as served,
        serve(served.service, ApiSettings(operator_keys=("operator",))) as url,
        httpx2.Client(base_url=url, timeout=60, headers=key) as http,
        Trainer(file, 2) as trainer,
    ):

        def told(path: str, **body: Any) -> Any:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def text() -> Any:
            return told("/v1/completions", prompt="abc", max_tokens=8)["choices"][0]["text"]

        before, update = text(), "/update_weights_from_distributed"
        told("/init_weights_update_group", **trainer.group, rank_offset=1, world_size=2)
        tensors = [*trainer.tensors.items()]
        first, second = (listing(dict(part)) for part in (tensors[:7], tensors[7:]))
        missing = len(second["names"])
        assert told(update, **first) == {
            "success": True,
            "message": f"{missing} of the model's tensors are missing; the old weights stay.",
            "weight_version": "0",
        }
        assert text() == before
        assert told(update, **second, weight_version="step 1")["weight_version"] == "step 1"
        assert text() != before
        refused = http.post(update, json={**first, "names": ["tail", *first["names"][1:]]})
        assert refused.status_code == 400
        assert "1 unexpected: tail" in refused.json()["error"]["message"]
        told("/destroy_weights_update_group")
