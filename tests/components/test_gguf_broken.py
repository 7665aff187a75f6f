"""Broken and foreign GGUF files: refused in one sentence, within little time and memory."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import CheckpointError, read_config, resolve
from diffray.components.checkpoints.gguf import read_gguf
from diffray.components.checkpoints.special_tokens import special_ids
from tests.helpers.gguf_files import TOKENS, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def patched(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:at] + new + old[at + len(new) :]


def after(mark: bytes, new: bytes, skip: int = 0) -> Callable[[bytes], bytes]:
    """Return a change of what follows the first place of these bytes."""
    return lambda old: patched(old.index(mark) + len(mark) + skip, new)(old)


HUGE = struct.pack("<Q", 2**62)
LARGE = struct.pack("<Q", 2**31)
NAME = b"token_embd.weight"
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda old: b"",
    "a few bytes": lambda old: old[:6],
    "only counts": lambda old: old[:24],
    "in the fields": lambda old: old[:200],
    "in the tokens": lambda old: old[: old.index(b"word50")],
    "in the tensors' names": lambda old: old[: old.index(NAME) + 4],
    "in the data": lambda old: old[:-100],
    "no data": lambda old: old[: len(old) // 20],
    "another magic": patched(0, b"GGML"),
    "version 1": patched(4, struct.pack("<I", 1)),
    "big-endian": patched(4, struct.pack(">I", 3)),
    "huge number of tensors": patched(8, HUGE),
    "huge number of fields": patched(16, HUGE),
    "large number of fields": patched(16, struct.pack("<Q", 2**21)),
    "huge text": after(b"general.architecture", HUGE, 4),
    "text that is not UTF-8": after(b"general.architecture", b"\xff\xfe", 12),
    "huge list": after(b"tokenizer.ggml.tokens", HUGE, 8),
    "large list": after(b"tokenizer.ggml.token_type", LARGE, 8),
    "list of lists": after(b"tokenizer.ggml.tokens", struct.pack("<I", 9), 4),
    "unknown type of field": after(b"tokenizer.ggml.pre", struct.pack("<I", 77)),
    "twice the same name": lambda old: old.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"),
    "no dimensions": after(NAME, struct.pack("<I", 0)),
    "many dimensions": after(NAME, struct.pack("<I", 2**31)),
    "huge dimensions": after(NAME, HUGE * 2, 4),
    "dimensions that overflow": after(NAME, struct.pack("<QQ", 2**63, 2), 4),
    "no columns": after(NAME, struct.pack("<Q", 0), 4),
    "fewer rows": after(NAME, struct.pack("<Q", 256), 12),
    "rows as columns": after(b"blk.0.attn_k.weight", struct.pack("<QQ", 32, 64), 4),
    "Q4_K": after(NAME, struct.pack("<I", 12), 20),
    "unknown type": after(NAME, struct.pack("<I", 999), 20),
    "data out of the file": after(NAME, HUGE, 24),
    "another name": lambda old: old.replace(b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight"),
}
WRONG: dict[str, object] = {
    "general.architecture": "gpt2",
    "dream.block_count": None,
    "dream.embedding_length": "x",
    "dream.attention.head_count": 0,
    "dream.attention.sliding_window": 64,
    "dream.rope.dimension_count": 8,
    "general.alignment": 3,
    "diffusion.shift_logits": False,
    "split.count": 2,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "tekken",
    "tokenizer.ggml.tokens": TOKENS[:-1],
    "tokenizer.ggml.token_type": [1] * 100,
    "tokenizer.ggml.merges": ["h e", "nothing here"],
    "tokenizer.ggml.eos_token_id": 512,
    "tokenizer.chat_template": 5,
}


def refusal(file: Path) -> str:
    """Load the file, within little time and memory; return the sentence that refuses it."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as found:
            load_model(file, device="cpu", dtype="float32")
            special_ids(resolve(file), read_config(resolve(file)))
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 5
    said = str(found.value)
    assert said.isprintable() and len(said) < 1000, said
    return said


@pytest.mark.parametrize("change", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path / "a.gguf", "dream", "Q8_0")
    file.write_bytes(change(file.read_bytes()))
    refusal(file)


@pytest.mark.parametrize("key", WRONG)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, key: str) -> None:
    refusal(write(tmp_path / "a.gguf", "dream", "Q8_0", {key: WRONG[key]}))


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "dream", "Q8_0")
    file.write_bytes(BROKEN["Q4_K"](file.read_bytes()))
    said = refusal(file)
    assert "'token_embd.weight' as Q4_K; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1" in said


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for path in ("none.gguf", str(tmp_path / "none.gguf"), "owner/none.gguf"):
        with pytest.raises(CheckpointError, match="no file"):
            resolve(path)


@pytest.mark.parametrize(("kind", "place"), [("Q8_0", 0), ("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2)])
def test_scales_and_minima_are_numbers(tmp_path: Path, kind: str, place: int) -> None:
    file = write(tmp_path / "a.gguf", "dream", kind)
    for name in ("token_embd.weight", "blk.3.ffn_down.weight"):
        start = read_gguf(file).tensors[name].start + place
        old = file.read_bytes()
        file.write_bytes(patched(start, b"\xff\xff")(old))
        assert "NaN" in refusal(file)
        file.write_bytes(old)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 3.0, 0.0])
def test_rotary_angles_are_scaled_as_in_llama3_or_refused(tmp_path: Path, value: float) -> None:
    file = write(tmp_path / "a.gguf", "ar_llama")
    start = read_gguf(file).tensors["rope_freqs.weight"].start
    file.write_bytes(patched(start, struct.pack("<f", value))(file.read_bytes()))
    assert "rope_freqs.weight" in refusal(file)
