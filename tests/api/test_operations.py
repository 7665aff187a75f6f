"""What operators may do over HTTP, and others may not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from diffray.cluster.api.settings import ApiSettings
from tests.helpers.adapters import adapter_of
from tests.helpers.api_server import Served, serve, serve_model
from tests.helpers.tiny import tiny_checkpoint

UPDATE = "/update_weights_from_disk"
ASK = {"prompt": "abc", "max_tokens": 8, "return_trajectory": True}
OPERATOR = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("operations")
    old, new = (tiny_checkpoint(folder / name) for name in ("old", "new"))
    (file,) = Path(new).glob("*.safetensors")
    save_file({name: each.flip(0).contiguous() for name, each in load_file(file).items()}, file)
    return [old, new]


@pytest.fixture(scope="module")
def served(folders: list[str]) -> Iterator[Served]:
    with serve_model(folders[0], "tiny", max_num_seqs=2) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with (
        serve(served.service, ApiSettings(operator_keys=("operator",))) as url,
        httpx2.Client(base_url=url, timeout=60, headers=OPERATOR) as http,
    ):
        yield http


def refused(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"].endswith(".") or status == 400
    assert "\n" not in error["message"]
    return error


def version(http: httpx2.Client) -> str:
    (model, *_) = http.get("/v1/models").json()["data"]
    assert model["weight_version"] == http.get("/v1/models/tiny").json()["weight_version"]
    return str(model["weight_version"])


def written(http: httpx2.Client) -> tuple[str, str]:
    """Return a text, and the version of the weights that wrote it."""
    (choice,) = http.post("/v1/completions", json=ASK).json()["choices"]
    return choice["text"], choice["trajectory"]["weight_version"]


def test_new_weights_from_a_folder(http: httpx2.Client, folders: list[str]) -> None:
    old, new = folders
    before = written(http)
    assert before[1] == version(http) == "0"
    answer = http.post(UPDATE, json={"model_path": new, "weight_version": "step 1"})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "success": True,
        "message": f"The weights are those of {new}.",
        "weight_version": "step 1",
    }
    after = written(http)
    assert after[0] != before[0] and after[1] == version(http) == "step 1"
    metrics = http.get("/metrics").text
    assert "diffray:num_weight_updates_total" in metrics
    assert 'diffray:weights_info{model_name="tiny",version="step 1"} 1.0' in metrics
    again = http.post(UPDATE, json={"model_path": new, "weight_version": "step 1"})
    assert "already have version step 1" in refused(again, 400)["message"]
    back = http.post(UPDATE, json={"model_path": old, "model": "tiny", "in_flight": "restart"})
    assert back.json()["weight_version"] == version(http) == "2"
    assert written(http) == (before[0], "2")


def asleep(http: httpx2.Client) -> bool:
    return bool(http.get("/is_sleeping").json()["is_sleeping"])


@pytest.mark.parametrize(("query", "level"), [("", 1), ("?level=1", 1), ("?level=2&model=tiny", 2)])
def test_asleep_requests_wait(served: Served, http: httpx2.Client, query: str, level: int) -> None:
    before = written(http)
    assert not asleep(http)
    slept = http.post(f"/sleep{query}")
    assert (slept.status_code, slept.content) == (200, b"")
    assert asleep(http) and f'diffray:engine_sleep_level{{model_name="tiny"}} {level}.0' in (
        http.get("/metrics").text
    )
    assert http.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(written, http)
        while http.get("/load").json()["waiting"] == 0:
            assert not waiting.done()
        assert http.post("/wake_up").status_code == 200
        assert waiting.result() == before
    assert not asleep(http) and http.post("/wake_up?model=tiny").status_code == 200


@pytest.mark.parametrize(
    ("asked", "body", "status", "words"),
    [
        ("/sleep?level=deep", None, 400, "level"),
        ("/sleep?mode=abort", None, 400, "mode"),
        ("/wake_up?tags=weights", None, 400, "tags"),
        ("/sleep?model=other", None, 404, "`other` does not exist"),
        (UPDATE, {}, 400, "model_path"),
        (UPDATE, {"model_path": "/no/such"}, 400, "no folder '/no/such'"),
        (UPDATE, {"model_path": "OTHER"}, 400, "another model: config.json differs in"),
        (UPDATE, {"model_path": "NEW", "in_flight": "abort"}, 400, "in_flight"),
        (UPDATE, {"model_path": "NEW", "model": "other"}, 404, "`other` does not exist"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_changes_nothing(
    http: httpx2.Client,
    folders: list[str],
    tmp_path: Path,
    asked: str,
    body: dict[str, Any] | None,
    status: int,
    words: str,
) -> None:
    if body and body.get("model_path") == "OTHER":
        body |= {"model_path": tiny_checkpoint(tmp_path / "other", "llada2_moe")}
    if body and body.get("model_path") == "NEW":
        body |= {"model_path": folders[1]}
    before = written(http), version(http)
    answer = http.post(asked, json=body)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert words in message and "\n" not in message, message
    assert (written(http), version(http), asleep(http)) == (*before, False)


def test_an_adapter_is_a_model(http: httpx2.Client, folders: list[str], tmp_path: Path) -> None:
    """vLLM's endpoints and listing; the answers are those of the adapter."""
    adapter = adapter_of(folders[0], tmp_path / "adapter", rank=8, lora_alpha=64)
    load = {"lora_name": "mine", "lora_path": str(adapter)}

    def ask(model: str) -> httpx2.Response:
        return http.post("/v1/completions", json=ASK | {"model": model})

    def text(model: str) -> str:
        answer = ask(model)
        assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
        return str(answer.json()["choices"][0]["text"])

    def operate(what: str, **more: str) -> httpx2.Response:
        return http.post(f"/v1/{what}_lora_adapter", json=(load if what == "load" else {}) | more)

    plain = text("tiny")
    answer = operate("load")
    assert answer.json() == {"success": True, "message": "The adapter mine is loaded."}
    listed = http.get("/v1/models").json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert parents == {"tiny": None, "tiny-alias": None, "mine": "tiny"}
    assert http.get("/v1/models/mine").json()["root"] == "tiny"
    adapted = text("mine")
    assert adapted != plain == text("tiny")
    assert operate("load").status_code == 200  # it is there
    (adapter / "adapter_config.json").touch()  # now it is another
    assert "unload it first" in refused(operate("load"), 400)["message"]
    unknown = refused(ask("x"), 404)
    assert unknown["message"] == "The model `x` does not exist; these do: `tiny`, `mine`."
    own = refused(operate("load", lora_name="tiny"), 400)
    assert own["param"] == "lora_name" and "choose another" in own["message"]
    assert "/no" in refused(operate("load", lora_name="x", lora_path="/no"), 400)["message"]
    assert operate("unload", lora_name="mine").status_code == 200
    assert refused(ask("mine"), 404)["code"] == "model_not_found"
    again = operate("unload", lora_name="mine")
    assert "no adapter 'mine' is loaded" in refused(again, 400)["message"]
    assert operate("load").status_code == 200
    assert text("mine") == adapted
