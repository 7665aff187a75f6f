"""GGUF files give the model and the tokenizer of the checkpoint that they were made from."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, models
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers as pre
from tokenizers.normalizers import NFC
from torch import Tensor
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import CheckpointError, pinned, read_config, resolve
from diffray.components.checkpoints.info import describe
from diffray.components.checkpoints.special_tokens import special_ids
from diffray.components.mesh import Mesh
from diffray.components.weight import Weight
from diffray.kernels.formats import BLOCKS
from diffray.kernels.quantize import dequantize, quantize
from tests.helpers.gguf_files import (
    ARCHITECTURES,
    MERGES,
    TOKENS,
    config_of,
    rounded,
    save,
    weights_of,
    write,
)
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import IDS, full_forward

KINDS = ("Q8_0", "Q4_0", "Q4_1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits_of(path: Path, family: str, mesh: Mesh | None = None) -> Tensor:
    model = load_model(path, dtype="float32", device="cpu", mesh=mesh)
    return full_forward(model, IDS, 1 if family.startswith("ar_") else 0)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_plain_tensors_give_the_same_logits(tmp_path: Path, family: str) -> None:
    original = save(tmp_path / "original", config_of(family), weights_of(family))
    expected = logits_of(original, family)
    assert torch.equal(logits_of(write(tmp_path / "a.gguf", family), family), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_blocks_are_kept_and_give_the_logits_of_their_numbers(
    tmp_path: Path, family: str, kind: str
) -> None:
    """ar_qwen3's head is its embedding, the others have one of their own."""
    original = save(tmp_path / "original", config_of(family), rounded(weights_of(family), kind))
    file = write(tmp_path / "a.gguf", family, kind)
    torch.testing.assert_close(
        logits_of(file, family), logits_of(original, family), atol=2e-5, rtol=1e-5
    )
    model = load_model(file, dtype="float32", device="cpu")
    kept = [each.kept for each in model.modules() if isinstance(each, Weight)]
    assert {each.format.kind for each in kept} == {kind.lower()}
    bits = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}[kind]
    assert all(8 * each.nbytes == bits * math.prod(each.shape) for each in kept)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_read_into_the_dtype_of_the_model(tmp_path: Path, kind: str) -> None:
    original = save(tmp_path / "original", config_of("dream"), rounded(weights_of("dream"), kind))
    file = write(tmp_path / "a.gguf", "dream", kind)
    assert torch.equal(logits_of(file, "dream"), logits_of(original, "dream"))


def on_rank(path: Path, mesh: Mesh) -> list[Tensor]:
    model = load_model(path, dtype="float32", device="cpu", mesh=mesh)
    logits, start = full_forward(model, IDS), model.spec.vocab_start
    soft = torch.linspace(0, 1, model.spec.vocab_size)[start : start + logits.shape[1]]
    return [logits, model.expected_embedding(soft.unsqueeze(0))]


def test_ranks_together_equal_one(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "llada", "Q8_0")
    whole = on_rank(file, Mesh())
    ranks, _ = over_ranks(2, False, partial(on_rank, file))
    torch.testing.assert_close(
        torch.cat([rank[0] for rank in ranks], dim=1), whole[0], atol=1e-4, rtol=1e-4
    )
    for rank in ranks:
        torch.testing.assert_close(rank[1], whole[1])


def test_ranks_divide_only_whole_blocks(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "dream", "Q8_0")  # 160 columns, 80 for each of two ranks
    with pytest.raises(ValueError, match="multiple of 32"):
        load_model(file, device="cpu", mesh=Mesh(0, 2))


@pytest.mark.parametrize("form", BLOCKS.values(), ids=list(BLOCKS))
def test_new_weights_are_rounded_to_blocks(form: Any) -> None:
    w_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    w_OI[0] = 0.0
    kept = quantize(w_OI, form)
    step = kept.scale_EOG.float().repeat_interleave(32, dim=1)
    assert bool(((dequantize(kept, torch.float32) - w_OI).abs() <= 0.53 * step + 1e-3).all())


# The tokenizer.

TEXTS = [
    "It's the 1234 12 1 12345 he\n\n  the  ABC!\n\n\t .a IT'S\r\n",
    "\u00e9t\u00e9 e\u0301 \u4e16\u754c \U0001f600 \u0661\u0662\u00bd  ",
    "<s>the<|end|> 1<|mask|>",
    "",
]


def truth(name: str) -> Fast:
    """Return a tokenizer with the splits of the family's own tokenizer.json."""
    made = Fast(
        models.BPE({t: n for n, t in enumerate(TOKENS)}, MERGES, ignore_merges="ll" in name)
    )
    own = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    made.pre_tokenizer = {
        "gpt-2": pre.ByteLevel(add_prefix_space=False),
        "smollm": pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)]),
        "llama-bpe": pre.Sequence([pre.Split(Regex(llama3), "isolated"), own]),
        "qwen2": pre.Sequence([pre.Split(Regex(PRETOKENIZE_REGEX), "isolated"), own]),
    }[name]
    if name == "qwen2":
        made.normalizer = NFC()
    made.add_special_tokens(TOKENS[-3:])
    return made


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_have_the_ids_of_the_original_tokenizer(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "a.gguf", "ar_qwen3", fields={"tokenizer.ggml.pre": name})
    own = Tokenizer.load(resolve(file), -1)
    assert own is not None
    for text in TEXTS:
        ids = truth(name).encode(text).ids
        first = [509] if name == "llama-bpe" and text else []  # as llama.cpp does by default
        assert own.encode(text) == [*first, *ids]
        assert own.encode(text, add_special_tokens=False) == ids
        if name != "qwen2":
            assert own.decode(ids, skip_special_tokens=False) == text
    assert own.chat_text([{"role": "user", "content": "hi"}]) == "hi"


def test_a_first_token_is_added_as_the_file_says(tmp_path: Path) -> None:
    for said in (True, False):
        fields = {"tokenizer.ggml.add_bos_token": said, "tokenizer.ggml.pre": "llada-moe"}
        tokenizer = Tokenizer.load(
            resolve(write(tmp_path / f"{said}.gguf", "llada", fields=fields)), -1
        )
        assert tokenizer is not None
        assert (tokenizer.encode("the")[0] == 509) is said


# The file as a checkpoint.


def test_a_file_serves_like_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = write(folder / "tiny.gguf", "llada", "Q4_1")
    assert resolve(folder) == resolve(file) == resolve(str(file))
    assert special_ids(resolve(file), read_config(resolve(file))) == (510, (511,))
    about = describe(file)
    assert (about.layers, about.hidden, about.vocab) == (4, 128, 512)
    assert about.bytes_on_disk == file.stat().st_size
    assert about.bytes_in_memory["bfloat16"] < file.stat().st_size * 1.1 + 2**21  # rotary tables
    llm = DiffusionLLM(str(file), device="cpu", dtype="float32")
    assert len(llm.generate("the", SamplingParams(max_tokens=8))[0].outputs[0].token_ids) > 0
    with pytest.raises(ValueError, match="quantized already"):
        load_model(file, device="cpu", quantization="int8")


def test_a_changed_file_is_read_again_and_an_unwritable_cache_is_no_obstacle(
    tmp_path: Path, cache: Path
) -> None:
    file = write(tmp_path / "a.gguf", "dream")
    before = resolve(file)
    assert before.is_relative_to(cache)
    write(file, "ar_qwen3")
    assert read_config(resolve(file))["architectures"] == ["Qwen3ForCausalLM"]
    (tmp_path / "in-the-way").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "in-the-way"))
        patch.setattr("tempfile.tempdir", str(tmp_path))
        found = resolve(file)
    assert found.is_relative_to(tmp_path) and read_config(found) == read_config(resolve(file))


def test_the_path_that_is_recorded_keeps_leading_to_the_file(tmp_path: Path, cache: Path) -> None:
    """The Hub's cache links to files without an ending; an adapter's folder is no model."""
    (tmp_path / "blobs").mkdir()
    blob = write(tmp_path / "blobs" / "m.gguf", "dream").rename(tmp_path / "blobs" / "0123abcd")
    shown = tmp_path / "snapshots" / "c0ffee"
    shown.mkdir(parents=True)
    (shown / "m.gguf").symlink_to(blob)
    for given in (shown, shown / "m.gguf"):
        assert read_config(resolve(pinned(given)))["architectures"] == ["DreamModel"]
    (shown / "n.gguf").symlink_to(blob)
    with pytest.raises(CheckpointError, match=r"several GGUF files \(.*m\.gguf.*\); name one"):
        resolve(shown)
    (shown / "adapter_config.json").write_text("{}")
    assert resolve(shown) == shown
