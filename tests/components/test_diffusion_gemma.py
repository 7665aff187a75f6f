"""DiffusionGemma against the original's logits, and what its config.json may say."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.golden import golden
from diffray.components.batch import Batch, Window
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import CheckpointError
from diffray.components.checkpoints.info import describe
from diffray.components.decoders.entropy_bound import EntropyBound
from diffray.components.iterations import Renoise
from diffray.components.kv_pool import KVPool
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model, kernels_for
from diffray.components.policy import DiffusionParams, Policy
from diffray.components.two_pass import TwoPass
from tests.helpers.paths import GOLDEN
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import assert_same

FOLDER = GOLDEN / "diffusion_gemma"
CPU = torch.device("cpu")
Run = Callable[[str, slice, int, Tensor | None], Tensor]


def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return found


def loaded(dtype: str = "float64", mesh: Mesh | None = None) -> TwoPass:
    model = load_model(FOLDER, dtype=dtype, device="cpu", mesh=mesh)
    assert isinstance(model, TwoPass)
    return model


@torch.inference_mode()
def denoised(
    model: TwoPass,
    prompts: list[list[int]],
    canvases: list[list[int]],
    soft_NLH: Tensor | None = None,
    image: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Return this rank's logits of canvases, in the forward that encodes their prompts.

    All prompts are as long as the first. An image is its first position and its soft tokens.
    """
    n, stop = len(prompts[0]), len(prompts[0]) + len(canvases[0])
    dtype = model.dtype
    pages = 1 + len(prompts) * -(-stop // 16)
    kv = KVPool(shapes=model.spec.kv_shapes, num_pages=pages, page_size=16, dtype=dtype, device=CPU)
    ends = [0, n] if image is None else [0, image[0], image[0] + len(image[1]), n]
    windows = []
    for first in range(0, stop * len(prompts), stop):
        pages_P = torch.tensor(kv.allocate(kv.pages_for(stop)))
        pieces = enumerate(pairwise(ends))
        windows += [Window(a, b, b, (1, -1)[at % 2], pages_P, first) for at, (a, b) in pieces]
        windows.append(Window(n, stop, stop, 0, pages_P, first))
    batch = Batch.pack(sorted(windows, key=lambda window: window.shape), CPU, 16)
    masked_T = batch.positions_T >= n
    texts = [[*prompt, *canvas] for prompt, canvas in zip(prompts, canvases, strict=True)]
    x_TH = model.embed(torch.tensor(texts).flatten()[batch.cells_T])
    if image is not None:
        place_T = batch.positions_T - image[0]
        shown_T = (place_T >= 0) & (place_T < len(image[1]))
        x_TH[shown_T] = image[1][place_T[shown_T]]
    soft_TH = torch.zeros_like(x_TH)
    if soft_NLH is not None:
        soft_TH[masked_T] = soft_NLH.flatten(0, 1).to(x_TH)
    batch = replace(batch, masked_T1=masked_T.unsqueeze(1))
    x_TH = model.soften(x_TH, soft_TH, batch)
    logits_RV = model.head(model.forward(x_TH, batch, kv)[masked_T])
    return logits_RV.view(len(prompts), -1, logits_RV.shape[-1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logits_and_soft_tokens_of_images_equal_the_original(dtype: str) -> None:
    """The second canvas is conditioned on the first one's logits, divided by 0.7."""
    model, before = loaded(dtype), torch.zeros(0)
    for number, case in enumerate(golden("diffusion_gemma")["full_forward"]):
        soft_NLH = None
        if number == 1:
            soft_NLH = model.expected_embedding((before / 0.7).softmax(-1))
        before = denoised(model, [case["prompt"]], [case["canvas"]], soft_NLH)
        expected = torch.tensor(case["logits"]).to(before)
        torch.testing.assert_close(before[0, case["positions"]], expected, atol=1e-4, rtol=0)
    image = golden("diffusion_gemma")["image"]
    with torch.inference_mode():
        soft_SH = model.look(torch.tensor(image["pixel_values"]), 6)
    expected = torch.tensor(image["soft_tokens"]).to(soft_SH)
    torch.testing.assert_close(soft_SH, expected, atol=1e-5, rtol=0)


def test_an_image_beyond_the_windows_reach_is_seen_as_by_the_original() -> None:
    """Its tokens see each other, and near keys of the text each as far as any other token."""
    original = pytest.importorskip("transformers.models.diffusion_gemma").modeling_diffusion_gemma
    theirs = original.DiffusionGemmaForBlockDiffusion.from_pretrained(
        FOLDER, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    image, before = golden("diffusion_gemma")["image"], [3 + 7 * at for at in range(46)]
    prompt = [*before, 508, 508, 508, 508, 507, 9, 10, 11]
    canvas, n = [5 + 11 * at for at in range(16)], len(prompt)
    types = torch.tensor([[int(token == 508) for token in prompt]])
    with torch.inference_mode():
        masks = theirs.model.encoder.create_masks_for_generate(
            config=theirs.config, inputs_embeds=torch.empty(1, n, 0),
            attention_mask=torch.ones(1, n, dtype=torch.bool), past_key_values=None,
            position_ids=torch.arange(n).unsqueeze(0), mm_token_type_ids=types,
        )  # fmt: skip
        expected = theirs(
            input_ids=torch.tensor([prompt]),
            pixel_values=torch.tensor([image["pixel_values"]], dtype=torch.float64),
            image_position_ids=torch.tensor([image["image_position_ids"]]),
            mm_token_type_ids=types,
            decoder_input_ids=torch.tensor([canvas]),
            attention_mask=masks,
        ).logits[0]
        model = loaded()
        soft_SH = model.look(torch.tensor(image["pixel_values"]), 6)
    (found,) = denoised(model, [prompt], [canvas], image=(46, soft_SH))
    torch.testing.assert_close(found, expected.double(), atol=1e-4, rtol=0)


@pytest.mark.long
def test_steps_round_as_much_alone_in_a_batch_and_in_the_original() -> None:
    """Each step is conditioned on the last one's logits, and so on its rounding in float32."""
    original = pytest.importorskip("transformers.models.diffusion_gemma").modeling_diffusion_gemma
    count, steps = 31, 12
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 500, (count, 20), generator=draw).tolist()
    canvases = torch.randint(3, 500, (steps, count, 16), generator=draw).tolist()

    @torch.inference_mode()
    def theirs(dtype: str, rows: slice, step: int, last_NLV: Tensor | None) -> Tensor:
        found: Tensor = originals[dtype](
            input_ids=torch.tensor(prompts[rows]),
            decoder_input_ids=torch.tensor(canvases[step][rows]),
            self_conditioning_logits=last_NLV,
        ).logits
        return found

    @torch.inference_mode()
    def ours(dtype: str, rows: slice, step: int, last_NLV: Tensor | None) -> Tensor:
        model, soft_NLH = models[dtype], None
        if last_NLV is not None:
            soft_NLH = model.expected_embedding(last_NLV.softmax(-1))
        return denoised(model, prompts[rows], canvases[step][rows], soft_NLH)

    def entropies(run: Run, dtype: str, size: int) -> Tensor:
        """Return those of each request [N], step and position, in batches of this size."""
        return torch.cat([denoise(run, dtype, slice(n, n + size)) for n in range(0, count, size)])

    def denoise(run: Run, dtype: str, rows: slice) -> Tensor:
        found, last_NLV = [], None
        for step in range(steps):
            last_NLV = run(dtype, rows, step, last_NLV) / (0.8 - 0.4 * step / steps)
            found.append(Categorical(logits=last_NLV.double()).entropy())
        return torch.stack(found, 1)

    build = original.DiffusionGemmaForBlockDiffusion.from_pretrained
    dtypes = "float64", "float32"
    models = {dtype: loaded(dtype) for dtype in dtypes}
    originals = {
        dtype: build(FOLDER, dtype=dtype, experts_implementation="eager").eval() for dtype in dtypes
    }
    error = {}
    for run in (ours, theirs):
        exact = entropies(run, "float64", count)
        for size in (1, count):
            most_N = (entropies(run, "float32", size) - exact).abs().amax((1, 2))
            error[run.__name__, size] = most_N.log().mean().exp().item()
    print(error)  # for docs/fidelity.md
    assert max(error.values()) < 1.5 * min(error.values()), error


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_together_equal_one(expert_parallel: bool) -> None:
    """The full layers' one key head is on both ranks, and self-conditioning is summed."""
    case = golden("diffusion_gemma")["full_forward"][0]
    weights_LV = torch.linspace(0, 1, 512, dtype=torch.float64).repeat(16, 1)

    def work(mesh: Mesh) -> Tensor:
        model = loaded(mesh=mesh)
        start = model.spec.vocab_start
        own_LV = weights_LV[:, start : start + 512 // mesh.size]
        with torch.inference_mode():
            soft_NLH = model.expected_embedding(own_LV).unsqueeze(0)
        return denoised(model, [case["prompt"]], [case["canvas"]], soft_NLH)

    ranks, _ = over_ranks(2, expert_parallel, work)
    torch.testing.assert_close(torch.cat(ranks, dim=-1), work(Mesh()))


def published() -> dict[str, Any]:
    found = config()
    found["text_config"] |= {
        "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
        "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2,
        "sliding_window": 1024, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "layer_types": None,
    }  # fmt: skip
    found["vision_config"] |= {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "patch_size": 16,
        "position_embedding_size": 10240,
    }  # fmt: skip
    return found


def test_a_published_config_has_its_size() -> None:
    """25.2 B, of which the tower has a few hundred millions; five layers of six see near keys."""
    model = build_model(published(), Mesh(), torch.bfloat16)
    parts = model.parts(set())
    numels = {name: torch.Size(part.shape).numel() for name, part in parts.items()}
    text = sum(n for name, n in numels.items() if "vision" not in name and name != "lm_head.weight")
    assert 24.9e9 < text < 25.3e9
    assert model.spec.kv_shapes == ((8, 256),) * 5 * 1 + ((2, 512),) + model.spec.kv_shapes[6:]
    assert model.spec.kv_shapes.count((2, 512)) == 5
    # transformers numbers layers with leading zeros; one that is not named has the usual heads.
    changed = published()
    text_config = changed["text_config"]
    own = {"head_dim": text_config.pop("global_head_dim")}
    own["num_key_value_heads"] = text_config.pop("num_global_key_value_heads")
    text_config["per_layer_config"] = {f"{number:02}": own for number in range(5, 30, 6)}
    assert build_model(changed, Mesh(), torch.bfloat16).spec == model.spec
    text_config["per_layer_config"] = {}
    assert {*build_model(changed, Mesh(), torch.bfloat16).spec.kv_shapes} == {(8, 256)}


@pytest.mark.parametrize("explicit", [False, True])
def test_what_transformers_saved_is_the_same_model(tmp_path: Path, explicit: bool) -> None:
    """It names each layer's heads instead of those of layers that see all."""
    original = pytest.importorskip("transformers.models.diffusion_gemma").modeling_diffusion_gemma
    theirs = original.DiffusionGemmaForBlockDiffusion.from_pretrained(FOLDER)
    theirs.config.text_config.serialize_explicit_per_layer_config = explicit
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "global_head_dim" not in written
    assert len(written["per_layer_config"]) == (4 if explicit else 2)
    saved, before = load_model(tmp_path, dtype="float64", device="cpu"), loaded()
    assert saved.spec == before.spec and describe(tmp_path).parameters > 0
    assert_same(saved.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("text_config", {"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
        ("text_config", {"attention_bias": True}, "attention_bias"),
        ("text_config", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("text_config", {"layer_types": ["sliding_attention"]}, "each of the 4 layers"),
        ("text_config", {"layer_types": ["a", "b", "c", "d"]}, "layer_types"),
        ("text_config", {"num_hidden_layers": None}, "lacks the key 'num_hidden_layers'"),
        ("text_config", {"top_k_experts": 7}, "top_k_experts"),
        ("text_config", {"per_layer_config": []}, "per_layer_config"),
        ("text_config", {"per_layer_config": {"4": {}}}, "layers 0 to 3 .* but says '4': {}"),
        ("text_config", {"per_layer_config": {"1": {"head_dim": 0}}}, "1 model: 'head_dim' is 0"),
        ("text_config", {"per_layer_config": {"1": {"skip": ["mlp"]}}}, "but says '1': {'skip'"),
        ("text_config", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
        ("vision_config", {"use_clipped_linears": True}, "use_clipped_linears"),
        ("vision_config", {"rope_parameters": {"rope_type": "default"}}, "rope_type"),
    ],
)
def test_what_is_not_implemented_is_refused(part: str, changes: dict[str, Any], said: str) -> None:
    changed = deepcopy(config())
    changed[part] |= changes
    with pytest.raises(ValueError, match=said):
        build_model(changed, Mesh(), torch.float32)


def recommending(folder: Path, given: object) -> Path:
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(FOLDER / name)
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def test_generation_config_has_the_sampler_s_defaults(tmp_path: Path) -> None:
    """Under transformers' names, as its own class writes them; what is left out stays."""
    given = {
        "eos_token_id": [1, 106],
        "max_denoising_steps": 7,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
        "t_max": 0.9,
        "stability_threshold": 0,
        "confidence_threshold": None,
    }
    folder = recommending(tmp_path, given)
    wanted = Policy.resolve(
        DiffusionParams(
            iteration=Renoise(max_steps=7, t_max=0.9, stability=0), decoder=EntropyBound(gamma=0.25)
        ),
        loaded().spec,
    )
    spec = load_model(folder, dtype="float32", device="cpu").spec
    assert Policy.resolve(DiffusionParams(), spec) == wanted
    assert Policy.resolve(DiffusionParams(), loaded().spec) != wanted
    assert describe(folder).diffusion == wanted.options()
    own = DiffusionParams(iteration=Renoise(max_steps=3))
    assert Policy.resolve(own, spec).iteration == Renoise(max_steps=3)  # nothing of the file's


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_denoising_steps": 0}, "max_denoising_steps: Input should be .*given: 0"),
        ({"t_min": "warm"}, "t_min: .*given: 'warm'"),
        ({"t_max": 1e9}, "t_max: "),
        ({"stability_threshold": -1}, "stability_threshold: "),
        ({"confidence_threshold": [1]}, "confidence_threshold: "),
        ({"sampler_config": {"entropy_bound": -0.1}}, "sampler_config.entropy_bound: "),
        ({"sampler_config": "entropy"}, "'sampler_config' is 'entropy'; expected an object"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, given: object, said: str) -> None:
    folder = recommending(tmp_path, given)
    for read in (describe, partial(load_model, device="cpu")):
        with pytest.raises(CheckpointError, match=f"generation_config.json: {said}") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_it_runs_on_torchs_functions_alone() -> None:
    assert kernels_for(config(), "auto", CPU, torch.float32).name == "torch"
    with pytest.raises(ValueError, match="sliding windows"):
        kernels_for(config(), "triton", CPU, torch.float32)
