"""A published model, not a random one: SmolLM2-135M-Instruct, as its GGUF file and widened."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffray import DiffusionLLM, SamplingParams
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import resolve
from tests.helpers import smollm2
from tests.helpers.adapters import merged, write_adapter
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import full_forward

pytestmark = pytest.mark.long

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 10, and say why 15 is none.",
]
TEXT = (
    "The water cycle describes how water moves between the sea, the air and the land. The sun "
    "warms the surface of the sea, water evaporates and rises as vapour, and where the air is "
    "cold it becomes clouds. Rain and snow bring it back to the ground, from where rivers carry "
    "it to the sea again. Without this cycle there would be no fresh water, and no life on land."
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield smollm2.fetch(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wide(gguf: Path) -> Path:
    """Return the folder of the widened weights, with the tokenizer of the file."""
    folder = gguf.parent / "wide"
    smollm2.widened(gguf, folder)
    for file in resolve(gguf).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def llm(wide: Path) -> Iterator[DiffusionLLM]:
    with DiffusionLLM(str(wide), dtype="float32", max_num_seqs=4, max_model_len=2048) as made:
        yield made


def chats(*questions: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


def said(llm: DiffusionLLM, params: SamplingParams, *questions: str) -> list[str]:
    return [out.outputs[0].text for out in llm.chat(chats(*questions), params, use_tqdm=False)]


def by_transformers(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=2
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("kind", ["widened", "in blocks"])
def test_greedy_answers_are_those_of_transformers(kind: str, gguf: Path, wide: Path) -> None:
    """The file's blocks are never widened as a whole, and give the same tokens.

    In float64, as their products round activations otherwise.
    """
    params = SamplingParams(max_tokens=24)
    path, dtype = (str(wide), "float32") if kind == "widened" else (str(gguf), "float64")
    with DiffusionLLM(path, dtype=dtype, max_model_len=256, max_num_seqs=3) as llm:
        outputs = llm.chat(chats(*QUESTIONS), params, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    for output in outputs:
        expected = by_transformers(wide, list(output.prompt_token_ids), 24)
        assert output.outputs[0].token_ids == expected


def test_what_rounding_costs_on_weights_with_outliers(
    llm: DiffusionLLM, wide: Path, gguf: Path
) -> None:
    """The loss of a text per token, before and after; the capital of France stays.

    From four beginnings, as that of 79 tokens in bytes changes by 2 % with a sum's last bits.
    """
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    loss: dict[str | None, float] = {}
    for form in (None, "int8", "w8a8", "int4_g32", "int4_g64", "activations"):
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": False}
        if form == "activations":  # of the file's own blocks
            model = load_model(gguf, **options)
            model.pack()
        else:
            model = load_model(wide, quantization=form, **options)
        loss[form] = 0.0
        for own in (ids[begin:] for begin in range(4)):
            logprobs = full_forward(model, own, 1).log_softmax(-1)[:-1]
            loss[form] -= float(logprobs.gather(1, torch.tensor(own[1:])[:, None]).mean()) / 4
    plain = loss.pop(None)
    assert plain < 3
    worse = {form: each / plain - 1 for form, each in loss.items()}
    assert worse["activations"] < 0.01, worse
    assert worse["int8"] < 0.01 and worse["w8a8"] < 0.03, worse
    assert worse["int4_g32"] < 0.12 and worse["int4_g32"] < worse["int4_g64"], worse
    options = {"dtype": "float32", "max_model_len": 128}
    with DiffusionLLM(str(wide), quantization="int8", **options) as rounded:
        (text,) = said(rounded, SamplingParams(max_tokens=12), QUESTIONS[0])
    assert "Paris" in text


def test_an_adapter_writes_what_merged_weights_write(wide: Path, tmp_path: Path) -> None:
    weights = load_file(wide / "model.safetensors")
    names = [f"model.layers.{at}.self_attn.{p}_proj" for at in range(0, 30, 3) for p in "qv"]
    adapter = write_adapter(tmp_path / "adapter", weights, names, size=0.05)
    shutil.copytree(wide, tmp_path / "merged", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(merged(weights, adapter), tmp_path / "merged" / "model.safetensors")
    params = SamplingParams(max_tokens=16)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
    with DiffusionLLM(str(tmp_path / "merged"), **options) as other:
        expected = said(other, params, *QUESTIONS)
    with DiffusionLLM(str(wide), lora_modules={"own": str(adapter)}, **options) as llm:
        plain = said(llm, params, *QUESTIONS)
        assert said(llm, params.model_copy(update={"lora": "own"}), *QUESTIONS) == expected != plain
        assert said(llm, params, *QUESTIONS) == plain


def test_guided_answers_fit_their_schema_and_say_something(llm: DiffusionLLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"enum": ["France", "Spain"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, structured_outputs={"json": schema})
    (text,) = said(llm, params, "Name the capital of France, as JSON with city and country.")
    assert json.loads(text) == {"city": "Paris", "country": "France"}


def test_a_long_prompt_is_stored_in_chunks_and_found_again(llm: DiffusionLLM, wide: Path) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(" ".join([TEXT] * 14) + " The first sentence again: The water")
    assert 1000 < len(ids) < 2000
    first, again = (
        llm.generate([ids], SamplingParams(max_tokens=12), use_tqdm=False)[0] for _ in range(2)
    )
    assert first.outputs[0].token_ids == by_transformers(wide, ids, 12)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.cached_tokens > len(ids) - 32


_PEAK = """
import re, sys
from diffray.components.checkpoints.checkpoint import load_model

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

load_model(sys.argv[1], dtype="float32", device="cpu", progress=False)
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = load_model(sys.argv[2], dtype="float32", device="cpu", progress=False)
print(peak() - before)
"""


def test_loading_takes_no_more_memory_than_the_file(gguf: Path, wide: Path) -> None:
    """At its peak; what is imported on the way is loaded before, with a small model."""

    def grown(path: Path) -> int:
        script = [sys.executable, "-c", _PEAK, str(GOLDEN / "ar_llama"), str(path)]
        return int(subprocess.run(script, capture_output=True, text=True, check=True).stdout)

    assert grown(gguf) < 1.1 * gguf.stat().st_size < grown(wide) / 4
