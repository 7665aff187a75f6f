"""Checks that diffray generates the same tokens as the original systems.

    python -m benchmarks.golden FOLDER...

A folder holds a checkpoint and `golden.json`, like those in `tests/golden`. A `golden.json` without
weights names the folder beside it that has the `checkpoint`; one without cases has another layout
of a family's weights, whose cases apply (`FAMILIES`). Every case is generated in float64 and in
float32; it is exact if its tokens are the original's in both, in no more forwards.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.mix_rule import by_rule
from benchmarks.random_checkpoint import GOLDEN
from diffray.components.image import Image
from diffray.components.params import SamplingParams
from diffray.workers.messages import Request

if TYPE_CHECKING:
    from diffray import DiffusionLLM

MASK, EOS = 510, 511
DTYPES = "float64", "float32"
FAMILIES = {
    "a2d_qwen3": "a2d_qwen3",
    "ar_llama": "ar_llama",
    "ar_qwen3": "ar_qwen3",
    "diffusion_gemma": "diffusion_gemma",
    "dream": "dream",
    "fast_dllm_v2": "fast_dllm_v2",
    "idlm": "idlm",
    "llada": "llada",
    "nemotron_labs_diffusion": "nemotron_labs_diffusion",
    "llada_moe": "llada_moe",
    "llada_moe_fused": "llada_moe",  # the same weights in another layout
    "llada2_moe": "llada2_moe",
    "sdar": "sdar",
    "sdar_moe": "sdar_moe",
}
# Autoregressive models and DiffusionGemma have no masks, and allow only one policy.
UNMASKED = "ar_llama", "ar_qwen3", "diffusion_gemma"
MASKED = sorted(set(FAMILIES.values()) - {*UNMASKED})
# The kinds that the originals name differently.
_KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {
        "maskgit": {"kind": "schedule", "order": "probability"},
        "margin": {"kind": "schedule", "order": "margin"},
        "entropy": {"kind": "schedule", "order": "entropy"},
        "static": {"kind": "threshold", "threshold": 1},
        "dynamic": {"kind": "threshold"},
    },
    "cache": {
        "block": {"kind": "exact"},
        "block+sub": {"kind": "sub_block"},
        "encoder": {"kind": "exact"},
        "causal": {"kind": "exact"},
    },
    "iteration": {"whole": {"kind": "blockwise"}, "canvas": {"kind": "renoise"}},
}
_NAMES = {
    "decoder": (
        "threshold low_threshold alpha gamma decay steps eps steps_per_block factor "
        "edit_threshold max_post_edit_steps step_limit rounding".split()
    ),
    "cache": "before after warmup".split(),
    "iteration": (
        "cont_weight cont_weight_init cont_weight_growth threshold_decay sub_block_length "
        "max_steps t_min t_max stability confidence lora context".split()
    ),
}

DRAFTS = "linear_spec_lora"  # the folder of an adapter for drafts, and its name here

Case = dict[str, Any]


def golden(family: str) -> dict[str, Any]:
    """Return the contents of a family's golden.json."""
    found: dict[str, Any] = json.loads((GOLDEN / family / "golden.json").read_text())
    return found


def cases_of(family: str) -> list[Case]:
    cases: list[Case] = golden(family)["cases"]
    return cases


def diffusion_of(case: Case) -> dict[str, object]:
    """Return a golden case as diffusion parameters."""
    case = renamed(case)
    kinds = {"iteration": "blockwise"} | case
    parts = {
        part: _KINDS[part].get(kinds[part], {"kind": kinds[part]})
        | {name: kinds[name] for name in _NAMES[part] if name in kinds}
        for part in ("iteration", "decoder", "cache")
    }
    whole = ("block_length", "cfg_scale", "zero_confidence_token_ids")
    return {name: case[name] for name in whole if name in case} | parts | {"canvas": "fixed"}


def renamed(case: Case) -> Case:
    """Return a case that states what its original system always does."""
    if case.get("first") == "prefill":
        return case | {"iteration": "first_token"}
    if "small_block_length" in case:  # accepts the best, and all strictly above the threshold
        parts = {"iteration": "sub_blocks", "sub_block_length": case["small_block_length"]}
        return case | parts | {"steps_per_block": case["block_length"]}
    if "seed_token" in case:
        return _nemotron(case)
    if case.get("mode") == "introspective":
        return case | {"lora": "drafts"}
    if case.get("mode") == "self_speculation":
        drafts = {"threshold": case["draft_threshold"]} if case["draft_threshold"] else {}
        return case | {"decoder": "threshold", "lora": "drafts"} | (drafts or {"step_limit": 1})
    if "rounding" in case:
        return _with_steps(case)
    if case.get("mode") == "ar":
        return case | {"iteration": "autoregressive"}
    if case.get("iteration") == "canvas":
        names = {"gamma": "entropy_bound", "max_steps": "max_denoising_steps"}
        names |= {name: f"{name}_threshold" for name in ("stability", "confidence")}
        return case | {name: case[theirs] for name, theirs in names.items()}
    if "denoising_steps" in case:
        steps = {"steps_per_block": case["denoising_steps"]}
        if case["decoder"] != "edit":
            return case | steps
        if case["edit_threshold"] is None:
            plain = {name: value for name, value in case.items() if "edit_" not in name}
            return plain | steps | {"decoder": "threshold"}
        return case | steps | {"max_post_edit_steps": case["max_post_edit_steps"] + 1}
    return case


def _nemotron(case: Case) -> Case:
    case = dict(case)
    if case["seed_token"]:
        case["iteration"] = "first_token"
        del case["context"]
    if case.get("policy") == "confidence_threshold":
        return case | {"step_limit": case.pop("steps_per_block")}
    return _with_steps(case) if case["decoder"] == "fixed" else case


def _with_steps(case: Case) -> Case:
    """Return a case of `fixed`, whose steps are those of the whole answer."""
    blocks = -(-case["gen_length"] // case["block_length"])
    case = {"steps": case["steps_per_block"] * blocks} | case
    del case["steps_per_block"]
    return case


def params_of(case: Case) -> SamplingParams:
    """Return a case's parameters; only its `stop_ids`, or else `eos_ids`, end the answer."""
    params = SamplingParams(
        max_tokens=case["gen_length"],
        ignore_eos=True,
        stop_token_ids=case.get("stop_ids") or case.get("eos_ids", ()),
        temperature=float(case.get("sampler") == "inverse_cdf"),
        bad_token_ids=case.get("bad_token_ids", ()),
        top_p=case.get("top_p", 1.0),
        top_k=case.get("top_k", 0),
        diffusion=diffusion_of(case),
    )
    return params.model_copy(update={"lora": DRAFTS}) if case.get("draft_lora") else params


def adapters_of(checkpoint: Path) -> dict[str, str]:
    """Return the adapters that come with a checkpoint."""
    folder = checkpoint / DRAFTS
    return {DRAFTS: str(folder)} if folder.is_dir() else {}


def images_of(found: dict[str, Any]) -> tuple[Image, ...]:
    """Return a golden.json's image, if it has one."""
    if (shown := found.get("image")) is None:
        return ()
    columns = 1 + max(across for across, _ in shown["image_position_ids"])
    pixels = torch.tensor(shown["pixel_values"]).numpy().tobytes()
    return (Image(shown["mm_token_type_ids"].index(1), columns, pixels),)


def differences(
    llm: "DiffusionLLM", cases: list[Case], images: tuple[Image, ...] = ()
) -> dict[int, str]:
    """Run all cases in one batch; return what differs in each case that is not exact."""
    shown = {number: images if "image" in case else () for number, case in enumerate(cases)}
    params, found = {}, {}
    for number, case in enumerate(cases):
        try:
            wanted = params_of(case)
            llm.engine.check(Request(0, tuple(case["prompt"]), wanted, images=shown[number]))
            params[number] = wanted.model_copy(update={"seed": number})
        except (KeyError, ValueError) as error:
            found[number] = f"cannot be requested: {error}"
    prompts = [cases[number]["prompt"] for number in params]
    with by_rule(dict(enumerate(cases))):
        outputs = llm.generate(
            prompts,
            list(params.values()),
            images=[shown[number] for number in params],
            use_tqdm=False,
        )
    for number, output in zip(params, outputs, strict=True):
        expected, most = written(cases[number]), cases[number].get("forwards")
        if (tokens := output.outputs[0].token_ids) != expected:
            pairs = enumerate(zip(tokens, expected, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))
            found[number] = f"other tokens from position {first} on"
        elif most is not None and output.forwards > most:
            found[number] = f"{output.forwards} forwards instead of {most}"
    return found


def written(case: Case) -> list[int]:
    """Return the tokens up to the first end token; DiffusionGemma's padding comes after it."""
    tokens: list[int] = case["tokens"]
    ends = [at for at, token in enumerate(tokens) if token in case.get("eos_ids", ())]
    return tokens[: ends[0] + 1] if ends else tokens


def run(folder: Path) -> tuple[int, int]:
    """Run a folder's cases, print the differences, and return the counts of exact and all cases."""
    from diffray import DiffusionLLM  # the GPU programs import this module without Ray

    found = json.loads((folder / "golden.json").read_text())
    checkpoint = folder.parent / found.get("checkpoint", folder.name)
    if "cases" not in found:
        found = json.loads((folder.parent / FAMILIES[folder.name] / "golden.json").read_text())
    cases, different = found["cases"], set()
    for dtype in DTYPES:
        mask = None if checkpoint.name in UNMASKED else found["mask_id"]
        ids = {"mask_token_id": mask, "eos_token_id": found["eos_id"]}
        ids["lora_modules"] = adapters_of(checkpoint)
        with DiffusionLLM(str(checkpoint), dtype=dtype, max_num_seqs=64, **ids) as llm:
            for number, what in sorted(differences(llm, cases, images_of(found)).items()):
                different.add(number)
                print(f"{folder} {dtype}, case {number}: {what}: {described(cases[number])}")
    return len(cases) - len(different), len(cases)


def described(case: Case) -> Case:
    """Return a case without its tokens."""
    return {name: value for name, value in case.items() if name not in ("prompt", "tokens")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    exact = total = 0
    for folder in parser.parse_args().folders:
        equal, count = run(folder)
        print(f"{folder}: {equal} of {count} exact")
        exact, total = exact + equal, total + count
    print(f"{exact} of {total} exact")
    sys.exit(exact < total)


if __name__ == "__main__":
    main()
