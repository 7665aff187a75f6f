"""Wrong and hostile checkpoints: refused in one sentence each, and nothing in them is executed."""

import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffray.cluster.api.settings import read_generation_defaults
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.convert import convert
from diffray.components.checkpoints.folder import CheckpointError, read_config, read_json
from diffray.components.checkpoints.info import describe
from diffray.components.checkpoints.special_tokens import find_ids, special_ids
from diffray.components.checkpoints.weights import open_weights
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny import tiny_checkpoint

FAMILIES = (
    *("llada", "llada_moe", "llada2_moe", "llada_moe_fused", "sdar", "sdar_moe"),
    *("dream", "fast_dllm_v2", "diffusion_gemma", "ar_llama"),
)
TOKENIZER = "tokenizer.json", "tokenizer_config.json"
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 2**31, 2**63, 10**40, 1e308, -1e-320, 0.5]),
    st.sampled_from([float("inf"), float("nan")]),
    st.text(max_size=8),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def opened(folder: Path) -> None:
    """Do all that starts with a checkpoint, up to where its weights would be read."""
    config = read_config(folder)
    describe(folder)
    mask, _ = special_ids(folder, config)
    Tokenizer.load(folder, mask)
    read_generation_defaults(folder)


def refused_or_fine(work: Callable[[], object], *words: str) -> bool:
    """Return whether it is refused, which takes one sentence with these words."""
    try:
        work()
    except ValueError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 3000, said
        assert all(word in said for word in words), said
        return True
    return False


def refused(work: Callable[[], object], *words: str) -> None:
    assert refused_or_fine(work, *words)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(tiny_checkpoint(tmp_path / "model"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "model"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def set_in(value: Any, path: list[Any], new: object) -> None:
    *way, last = path
    for step in way:
        value = value[step]
    value[last] = new


def paths(value: object, most: int = 3) -> list[list[Any]]:
    """Return the ways to a value's parts; of long lists to their beginning."""
    if most == 0 or not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(min(len(value), 3)))
    return [[key, *rest] for key in keys[:60] for rest in ([], *paths(value[key], most - 1))]


# What is in the files.


@pytest.mark.slow
@MANY
@given(
    family=st.sampled_from(FAMILIES),
    name=st.sampled_from(["config.json"] * 3 + ["generation_config.json", *TOKENIZER]),
    data=st.data(),
)
def test_no_json_file_gets_further_than_a_sentence(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Path,
    family: str,
    name: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("json") / "model"
    shutil.copytree(GOLDEN / family, folder, copy_function=os.symlink)
    for file in TOKENIZER:
        shutil.copy(tokenizer / file, folder)
    old = folder / name
    value = json.loads(old.read_text()) if old.exists() else {"temperature": 1.0, "top_k": 5}
    for _ in range(data.draw(st.integers(0, 3))):
        set_in(value, data.draw(st.sampled_from(paths(value))), data.draw(ODD))
    text = json.dumps(value).encode()
    old.unlink(missing_ok=True)
    old.write_bytes(text if data.draw(st.booleans()) else mutated(text, data))
    for work in (opened, describe, lambda folder: special_ids(folder, read_config(folder))):
        refused_or_fine(partial(work, folder))
    shutil.rmtree(folder)


def mutated(content: bytes, data: st.DataObject, head: int | None = None) -> bytes:
    made = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(made), head or len(made))))
        match data.draw(st.integers(0, 3)):
            case 0:
                del made[at:]
            case 1:
                del made[at : at + data.draw(st.integers(1, 9))]
            case 2:
                made[at:at] = data.draw(st.binary(max_size=4))
            case _:
                made[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    return bytes(made)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("config.json", "", "not valid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "[" * 10**5, "too deep"),
        ("config.json", '{"n_heads": ' + "9" * 5000 + "}", "not valid JSON"),
        ("config.json", '{"n_heads": 1, "n_heads": 2}', "twice"),
        ("config.json", '{"architectures": [["LLaDAModelLM"]]}', "architectures"),
        ("config.json", '{"architectures": "LLaDAModelLM"}', "architectures"),
        ("tokenizer.json", "{}", ""),
        ("tokenizer.json", "\0", ""),
        ("tokenizer_config.json", "[]", ""),
        ("generation_config.json", '{"temperature": "hot"}', "temperature"),
        ("generation_config.json", '{"max_new_tokens": -4}', "max_new_tokens"),
    ],
)
def test_the_sentence_names_file_and_key(tiny: Path, name: str, text: str, word: str) -> None:
    (tiny / name).write_text(text)
    refused(lambda: opened(tiny), name, word)


@pytest.mark.parametrize(
    "added", [[1], [{"content": "a", "id": "1"}], {"x": {"content": "a"}}, {"1": 5}]
)
def test_added_tokens_that_are_none_are_named(tmp_path: Path, added: object) -> None:
    name, key = "tokenizer.json", "added_tokens"
    if isinstance(added, dict):
        name, key = "tokenizer_config.json", "added_tokens_decoder"
    (tmp_path / name).write_text(json.dumps({key: added}))
    refused(lambda: find_ids(tmp_path, {}, "mask"), name, key)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llada", "n_layers", 10**9), ("llada", "d_model", 10**30),
        ("llada", "rope_theta", float("inf")), ("llada_moe", "num_experts", 10**9),
        ("llada2_moe", "vocab_size", 2**62), ("llada2_moe", "partial_rotary_factor", 1e29),
    ],
)  # fmt: skip
def test_sizes_of_no_model_are_refused(tmp_path: Path, family: str, key: str, value: float) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / family, folder)
    edit(folder / "config.json", lambda config: config.update({key: value, "head_dim": 8}))
    refused(lambda: describe(folder), "config.json")


def test_code_that_comes_with_a_checkpoint_is_not_run(tiny: Path) -> None:
    marks = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None]}
    (tiny / "evil.py").write_text(f"open({str(tiny / 'ran')!r}, 'w')\nclass Config: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        edit(tiny / name, lambda value: value.update({"auto_map": marks}))
    opened(tiny)
    load_model(tiny, progress=False)
    assert not (tiny / "ran").exists()


# Weights.


@pytest.mark.parametrize(
    ("shape", "dtype"), [([3], "F32"), ([2**40, 2**40], "F32"), ([-2], "F32"), ([2], "F99")]
)
def test_broken_safetensors_are_refused(tmp_path: Path, shape: list[int], dtype: str) -> None:
    """Reading them raises errors of several types."""
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    refused(lambda: open_weights(tmp_path), "model.safetensors", "download it again")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@MANY
@given(data=st.data())
def test_no_change_of_weights_gets_further_than_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    shutil.copy(GOLDEN / "llada" / "config.json", folder)
    file, head = folder / name, None
    if name == "model.safetensors":
        shutil.copy(GOLDEN / "llada" / name, file)
        head = 4000
    else:
        torch.save({"a": torch.zeros(3, 4), "b": torch.ones(2)}, file)
    file.write_bytes(mutated(file.read_bytes(), data, head))
    refused_or_fine(lambda: load_model(folder, progress=False))
    shutil.rmtree(folder)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_not_executed(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    torch.save({"a": Evil(mark)}, saved := io.BytesIO())
    for content in (saved.getvalue(), pickle.dumps(Evil(mark))):
        (tmp_path / name).write_bytes(content)
        refused(lambda: open_weights(tmp_path), name)
        assert not mark.exists()


@pytest.mark.parametrize(
    "state",
    [
        {1: torch.zeros(2)}, {"a": [torch.zeros(2)]}, {"a": torch.zeros(2).to_sparse()},
        {"a": torch.zeros(2, device="meta")}, torch.zeros(2),
    ],
)  # fmt: skip
def test_a_state_dict_holds_plain_tensors_by_name(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    refused(lambda: open_weights(tmp_path), "pytorch_model.bin", "save it as safetensors")


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0.safetensors"),
        *("evil.bin", "config.json", "\ud800.safetensors", 5, None, ["a"], {"a": 1}, 10**30),
    ],
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: object) -> None:
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refused(lambda: open_weights(tmp_path), "model.safetensors.index.json")
    assert not (tmp_path / "ran").exists()


# Links.


def test_weights_may_be_links_as_the_hub_cache_has_them(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    source = Path(tiny_checkpoint(tmp_path / "plain", "llada_moe"))
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    opened(snapshot)
    load_model(snapshot, progress=False)
    convert(snapshot, tmp_path / "fused", progress=False)


def test_a_link_that_leads_out_is_not_copied(tmp_path: Path) -> None:
    source = Path(tiny_checkpoint(tmp_path / "model", "llada_moe"))
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    refused(lambda: convert(source, tmp_path / "new", progress=False), "notes.txt", "link")
    assert not (tmp_path / "new").exists()


def test_json_of_a_size_that_none_has_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(CheckpointError, match="MiB"):
        read_json(tmp_path / "config.json")
