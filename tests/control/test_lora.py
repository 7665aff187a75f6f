"""LoRA adapters: each request is answered as by a model into which its adapter was merged."""

import json
import random
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffray import DiffusionLLM, SamplingParams
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.weight import Weight
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import dequantize, quantize
from diffray.workers.messages import Request
from tests.helpers.adapters import Story, merged, modules_of, write_adapter
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import (
    DREAM,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    random_weights,
    save,
)
from tests.helpers.toy import drain, last_update

FAMILIES = {"llada": LLADA, "llada_moe": LLADA_MOE, "llada2_moe": LLADA2_MOE}
FAMILIES |= {"dream": DREAM, "sdar": SDAR}
OPTIONS: dict[str, Any] = {"dtype": "float64", "mask_token_id": 62, "eos_token_id": 63}


def prompts(count: int = 9) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(60) for _ in range(3 + 2 * number)] for number in range(count)]


Asked = list[tuple[list[int], SamplingParams]]


def asked(name: str, number: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, lora=name, seed=number)


def load(model: Path, **options: Any) -> DiffusionLLM:
    return DiffusionLLM(str(model), **(OPTIONS | options))


def several(llm: DiffusionLLM, asks: Asked) -> list[list[int]]:
    outputs = llm.generate([prompt for prompt, _ in asks], [params for _, params in asks])
    return [output.outputs[0].token_ids for output in outputs]


def written(llm: DiffusionLLM, prompt: list[int], name: str) -> list[int]:
    return several(llm, [(prompt, asked(name))])[0]


def answers(model: Path, asks: Asked, **options: Any) -> list[Any]:
    with load(model, **options) as llm:
        return several(llm, asks)


def adapted(story: Story, asks: Asked, **options: Any) -> list[Any]:
    return answers(story.base, asks, lora_modules=story.adapters, **options)


def by_merged_weights(story: Story, asks: Asked) -> list[Any]:
    found = []
    for prompt, params in asks:
        plain = params.model_copy(update={"lora": ""})
        found += answers(story.merged[params.lora], [(prompt, plain)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotate(1)
def test_mixed_in_a_batch_each_is_answered_as_by_merged_weights(
    tmp_path: Path, family: str
) -> None:
    story = Story(tmp_path, FAMILIES[family])
    names = ["", *story.adapters]
    asks = [(p, asked(names[n % 4], n)) for n, p in enumerate(prompts())]
    expected = by_merged_weights(story, asks)
    assert adapted(story, asks) == expected
    assert expected != answers(story.base, [(prompt, asked("")) for prompt, _ in asks])
    for one, own in zip(asks, expected, strict=True):
        assert adapted(story, [one]) == [own]


def test_k_v_are_shared_among_requests_of_one_adapter_alone(tmp_path: Path) -> None:
    """And no salt of a client reaches them, whatever a request without the adapter stored."""
    story = Story(tmp_path, SDAR)
    prompt = prompts()[-1]
    asks = [(prompt, asked(name)) for name in ("a0", "", "a1", "a0", "a1", "")]
    expected = by_merged_weights(story, asks)
    options: dict[str, Any] = {"lora_modules": story.adapters, "page_size": 4}
    with load(story.base, **options) as llm:
        outputs = [llm.generate([ids], params)[0].outputs[0] for ids, params in asks]
    assert [output.token_ids for output in outputs] == expected
    assert [output.cached_tokens > 0 for output in outputs] == [False] * 3 + [True] * 3
    with load(story.base, **options) as llm:
        engine, lora = llm.engine, llm.adapters.find("a1")
        for uid, salt in enumerate(("", lora.name, f"\0{lora.number}\0{lora.name}", str(lora))):
            engine.add(Request(uid, tuple(prompt), asked(""), cache_salt=salt))
            drain(engine)
        tokens, last = last_update(engine, Request(9, tuple(prompt), asked("a1"), lora=lora))
    assert tokens == expected[2] and last.cached_tokens == 0


def test_loaded_and_unloaded_while_the_engine_runs(tmp_path: Path) -> None:
    """What is loaded does not follow its file until it is loaded anew; then nothing is shared.

    Nothing would be converted from this dtype.
    """
    story = Story(tmp_path, SDAR)
    prompt, file = prompts()[-1], Path(story.adapters["a0"]) / "adapter_model.safetensors"
    plain, *own = by_merged_weights(story, [(prompt, asked(name)) for name in ("", "a0", "a1")])
    with load(story.base, lora_modules={"x": story.adapters["a2"]}, page_size=4) as llm:
        llm.adapters.load("mine", story.adapters["a0"])
        assert written(llm, prompt, "mine") == own[0]
        assert llm.adapters.load("mine", story.adapters["a0"]) == llm.adapters.find("mine")
        with pytest.raises(ValueError, match="'mine' is loaded; unload it first"):
            llm.adapters.load("mine", story.adapters["a1"])
        with file.open("r+b") as opened:
            opened.truncate(100)
        assert written(llm, prompt, "mine") == own[0]
        shutil.rmtree(file.parent)
        shutil.copytree(story.adapters["a1"], file.parent)
        llm.adapters.unload("mine")
        with pytest.raises(ValueError, match="no adapter 'mine' is loaded"):
            written(llm, prompt, "mine")
        llm.adapters.load("mine", story.adapters["a0"])
        assert written(llm, prompt, "mine") == own[1]
        assert written(llm, prompt, "") == plain
        with pytest.raises(ValueError, match=r"no adapter 'mime' is loaded, did you mean 'mine'\?"):
            written(llm, prompt, "mime")


def test_policies_that_run_copies_run_them_with_the_adapter(tmp_path: Path) -> None:
    story = Story(tmp_path)
    policies: list[dict[str, Any]] = [
        {"cfg_scale": 1.5},
        {"cache": {"kind": "dual"}, "block_length": 4},
        {"cache": {"kind": "prefix"}, "block_length": 4},
        {"decoder": {"kind": "fixed"}, "speculation": {"kind": "verify", "drafts": 2}},
        {"iteration": {"kind": "soft"}},
    ]
    plain: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 0}
    asks = [
        (prompt, SamplingParams(**plain, lora=f"a{n % 3}", diffusion=policies[n]))
        for n, prompt in enumerate(prompts(5))
    ]
    assert adapted(story, asks) == by_merged_weights(story, asks)


def test_rows_without_an_adapter_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    """In float32 too: nothing is added to what they are, beside others or alone."""
    story = Story(tmp_path)
    asks = [(prompt, asked("a1" if n % 2 else "")) for n, prompt in enumerate(prompts())]

    def logprobs(among: Asked) -> list[Any]:
        with load(story.base, dtype="float32", lora_modules=story.adapters) as llm:
            params = [p.model_copy(update={"logprobs": True}) for _, p in among]
            outputs = llm.generate([each for each, _ in among], params)
        return [output.outputs[0].logprobs for output in outputs]

    plain = [(prompt, asked("")) for prompt, _ in asks]
    assert logprobs(asks)[::2] == logprobs(plain)[::2]
    assert logprobs(asks)[1::2] != logprobs(plain)[1::2]


def test_unused_adapters_are_evicted(tmp_path: Path) -> None:
    story = Story(tmp_path, adapters=5)
    asks = [(prompt, asked(f"a{n % 5}")) for n, prompt in enumerate(prompts(10))]
    expected = by_merged_weights(story, asks)
    with load(story.base, lora_modules=story.adapters, max_loras=2, max_num_seqs=3) as llm:
        for _ in range(2):
            assert several(llm, asks) == expected
        kept = []
        for name in ("a4", "a1", "a4", "a2", "a1", "a0"):
            llm.generate([1, 2, 3], lora=name, max_tokens=4)
            kept.append(adapters_in(llm))
    assert kept[1:] == [{"a4", "a1"}, {"a1", "a4"}, {"a4", "a2"}, {"a2", "a1"}, {"a1", "a0"}]


def adapters_in(llm: DiffusionLLM) -> set[str]:
    weights = [m for m in llm.engine.model.modules() if isinstance(m, Weight)]  # type: ignore[attr-defined]
    return {lora.name for m in weights if m.lora is not None for lora in m.lora.deltas}


def test_all_read_the_commit_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's newest changes after the order; ranks that load it then get the one before."""
    story, commits = Story(tmp_path), ["0" * 40, "1" * 40]
    snapshots = tmp_path / "hub" / "snapshots"
    for commit, name in zip(commits, ("a0", "a1"), strict=True):
        shutil.copytree(story.adapters[name], snapshots / commit)
    newest = commits[:1]

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == "some/adapter" and "*.safetensors" in allow_patterns
        return str(snapshots / (revision or newest[-1]))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    prompt = prompts()[3]
    (own,) = answers(story.merged["a0"], [(prompt, asked(""))])
    with load(story.base) as llm:
        loaded = llm.adapters.load("mine", "some/adapter")
        assert loaded.path == f"some/adapter@{commits[0]}"
        newest.append(commits[1])
        assert written(llm, prompt, "mine") == own
        with pytest.raises(ValueError, match="'mine' is loaded; unload it first"):
            llm.adapters.load("mine", "some/adapter")
        assert llm.adapters.load("mine", f"some/adapter@{commits[0]}") == loaded


def test_new_weights_are_adapted_too(tmp_path: Path) -> None:
    story = Story(tmp_path)
    prompt = prompts()[5]
    other = {name: tensor * 1.1 for name, tensor in story.weights.items()}
    both = merged(other, Path(story.adapters["a0"]))
    (expected,) = answers(save(tmp_path / "both", LLADA, both), [(prompt, asked(""))])
    with load(story.base, lora_modules=story.adapters) as llm:
        written(llm, prompt, "a0")
        llm.update_weights(other)
        llm.adapters.load("again", story.adapters["a0"])
        assert written(llm, prompt, "a0") == written(llm, prompt, "again") == expected


@pytest.mark.parametrize("family", ["llada", "llada2_moe"])
def test_beside_quantized_weights(tmp_path: Path, family: str) -> None:
    """An adapter is added to what the bytes stand for."""
    config = FAMILIES[family]
    story = Story(tmp_path, config)
    asks = [(prompt, asked(f"a{number}")) for number, prompt in enumerate(prompts(3))]
    form = FORMATS["int8"]
    rounded = {
        name: dequantize(quantize(tensor, form), torch.float64)
        if name.removesuffix(".weight") in modules_of(story.weights)
        else tensor
        for name, tensor in story.weights.items()
    }
    expected = []
    for prompt, params in asks:
        both = merged(rounded, Path(story.adapters[params.lora]))
        folder = save(tmp_path / f"rounded {params.lora}", config, both)
        expected += answers(folder, [(prompt, asked("", params.seed or 0))])
    parts = ["attention", "mlp"] if family == "llada" else ["attention", "mlp", "experts"]
    assert adapted(story, asks, quantization=dict.fromkeys(parts, "int8")) == expected
    assert adapted(story, asks) != expected


def test_targets_that_peft_leaves_out_need_no_tensors(tmp_path: Path) -> None:
    story = Story(tmp_path, adapters=0)
    first = next(name for name in modules_of(story.weights) if name.endswith("blocks.0.q_proj"))
    second = first.replace("blocks.0", "blocks.1")
    allowed: list[dict[str, Any]] = [
        {"target_modules": [first, "no_such_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": [second]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0]},
        {"target_modules": None},
    ]
    with load(story.base) as llm:
        for number, fields in enumerate(allowed):
            adapter = write_adapter(tmp_path / str(number), story.weights, [first], **fields)
            assert llm.adapters.load(str(number), str(adapter))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    ({"use_dora": True}, "use_dora is True, which is not supported"),
    ({"bias": "all"}, "bias is 'all', which is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"r": 4}, r"lora_A.weight is \[3, 32\], and with rank 4 this model needs \[4, 32\]"),
    ({"r": 100}, "has rank 100, and max_lora_rank is 64; raise it"),
    ({"r": 0}, "r is 0; expected a number above 0"),
    ({"lora_alpha": None}, "lora_alpha is None"),
    ({"r": 1e999}, "r is inf; expected a number above 0"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"rank_pattern": [1]}, r"rank_pattern is \[1\]; expected an object"),
    ({"rank_pattern": {"(": 3}}, "rank_pattern: '\\(': missing"),
    ({"alpha_pattern": {"q": "big"}}, "alpha_pattern of 'q' is 'big'"),
    ({"target_modules": ["q_proj"]}, "lacks .*q_proj, which target_modules in .* names"),
    ({"target_modules": r".*blocks\.1\.ff_out"}, r"lacks .*1\.ff_out, which target_modules"),
    ({"target_modules": "("}, r"target_modules: '\('"),
    ({"target_modules": 3}, "target_modules: 3"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config is {'top_k': 2}, which is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
]


def test_what_does_not_fit_the_model_is_one_sentence(tmp_path: Path) -> None:
    dense, moe = random_weights(LLADA), random_weights(LLADA_MOE)
    bases = save(tmp_path / "dense", LLADA, dense), save(tmp_path / "moe", LLADA_MOE, moe)
    router = next(name for name in moe if name.endswith("mlp.gate.weight"))
    odd = write_adapter(tmp_path / "odd", moe, modules_of(moe))
    (odd / "adapter_model.safetensors").rename(odd / "adapter_model.bin")

    number = count()

    def adapter(weights: dict[str, Any], *modules: str, **fields: Any) -> Path:
        return write_adapter(tmp_path / str(next(number)), weights, [*modules], **fields)

    nan = adapter(dense, modules_of(dense)[0])
    tensors = load_file(nan / "adapter_model.safetensors")
    tensors[next(name for name in tensors if "lora_B" in name)][-1, -1] = float("nan")
    save_file(tensors, nan / "adapter_model.safetensors")
    not_adapted = "not routers, embeddings or the head"
    cases: list[tuple[Path, Path, str]] = [
        (bases[1], adapter(dense, *modules_of(dense)), "which this model does not have"),
        (bases[1], adapter(moe, router.removesuffix(".weight")), not_adapted),
        (bases[1], adapter(moe, "lm_head"), not_adapted),
        (bases[0], nan, "lora_B.weight has NaN or infinite values"),
        (bases[1], odd, "save the adapter as safetensors"),
        (bases[1], bases[1], "has no adapter_config.json; give the folder of a LoRA adapter"),
        (bases[1], tmp_path / "nowhere", "nowhere"),
        *((bases[0], adapter(dense, modules_of(dense)[0], **fields), s) for fields, s in REFUSED),
    ]
    llms = {base: load(base) for base in bases}
    for base, path, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            llms[base].adapters.load("x", str(path))
        assert not llms[base].adapters.names


def test_an_adapter_that_memory_has_no_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story(tmp_path, LLADA_MOE, adapters=1)
    tensors = load_file(Path(story.adapters["a0"]) / "adapter_model.safetensors")
    size = sum(8 * tensor.numel() for tensor in tensors.values())
    free = [size - 1]
    monkeypatch.setattr("diffray.components.checkpoints.lora.free_memory", lambda _: free[0])
    with load(story.base, lora_modules=story.adapters) as llm:
        with pytest.raises(RuntimeError, match="could not be loaded, the engine's log says why"):
            llm.generate([1, 2, 3], lora="a0", max_tokens=4)
        assert f"takes {size} bytes of memory here; {size - 1} are free" in caplog.text
        assert not adapters_in(llm)
        free[0] = size
        assert llm.generate([1, 2, 3], lora="a0", max_tokens=4)[0].outputs[0].token_ids


def test_scales_of_peft(tmp_path: Path) -> None:
    """Rank-stabilised scaling and patterns of ranks and alphas, as PEFT applies them."""
    story = Story(tmp_path, adapters=0)
    module = modules_of(story.weights)[0]
    prompt = prompts()[4]
    found = {}
    for name, fields, scale in (
        ("plain", {}, 2.0),
        ("stable", {"use_rslora": True}, 6 / 3**0.5),
        ("alphas", {"alpha_pattern": {module.rsplit(".", 1)[1]: 12}}, 4.0),
        ("ranks", {"r": 8, "rank_pattern": {module: 3}}, 2.0),
    ):
        adapter = write_adapter(tmp_path / name, story.weights, [module], **fields)
        both = save(tmp_path / f"{name} merged", LLADA, merged(story.weights, adapter, scale))
        given = {"lora_modules": {"x": str(adapter)}}
        found[name] = answers(story.base, [(prompt, asked("x"))], **given)
        assert found[name] == answers(both, [(prompt, asked(""))]), name
    assert found["plain"] != found["alphas"]


@pytest.mark.slow
def test_diffusion_gemma_s_self_conditioning_is_adapted_too(tmp_path: Path) -> None:
    """It runs before the layers do."""
    config = json.loads((GOLDEN / "diffusion_gemma" / "config.json").read_text())
    parts = build_model(config, Mesh(), torch.float64).parts(())
    weights = random_weights(config)
    base = save(tmp_path / "base", config, weights)
    modules = [
        name.removesuffix(".weight")
        for name, part in parts.items()
        if part.weight is not None and part.weight.part in ("attention", "mlp")
    ]
    assert any("self_conditioning" in module for module in modules)
    adapter = write_adapter(tmp_path / "x", weights, modules)
    both = save(tmp_path / "both", config, merged(weights, adapter))
    options: dict[str, Any] = {"mask_token_id": None, "eos_token_id": 1}
    asks = [
        (prompt, SamplingParams(max_tokens=8, seed=n, lora=("", "x")[n % 2]))
        for n, prompt in enumerate(prompts(4))
    ]
    plain = [(prompt, params.model_copy(update={"lora": ""})) for prompt, params in asks]
    mixed = answers(base, asks, lora_modules={"x": str(adapter)}, **options)
    assert mixed[::2] == answers(base, plain, **options)[::2]
    assert mixed[1::2] == answers(both, plain, **options)[1::2]
