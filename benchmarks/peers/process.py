"""Answers requests with a peer's own code, in that peer's environment: JSON lines in and out.

    python process.py NAME CHECKPOINT THREADS CODE

A request holds prompts (token ids), the tokens to write after each, and the settings; the answer is
the seconds, and each prompt's tokens and forwards.
"""

import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

Answers = tuple[list[list[int]], list[int]]


def block_causal(length: int, block_length: int) -> torch.Tensor:
    """Return the mask that is added to scores: 0 up to the end of a query's own block."""
    blocks = torch.arange(length) // block_length
    seen = blocks.unsqueeze(0) <= blocks.unsqueeze(1)
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


class Diffusers:
    """diffusers' LLaDA2Pipeline, one prompt at a time, and the forwards of its model.

    It passes a two-dimensional mask, from which the published model code makes a causal one, or
    none at all if no position is padded; `block_causal` gives the model LLaDA2's own mask.
    """

    def __init__(self, checkpoint: str, code: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        diffusers: Any = importlib.import_module("diffusers")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, trust_remote_code=True, torch_dtype=torch.float32
        ).eval()
        scheduler = diffusers.BlockRefinementScheduler()
        self.pipeline: Any = diffusers.LLaDA2Pipeline(model=model, scheduler=scheduler)
        self.pipeline.set_progress_bar_config(disable=True)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        self.forwards = self.mask_blocks = 0

    def before(self, module: Any, args: Any, named: dict[str, Any]) -> Any:
        self.forwards += 1
        if self.mask_blocks:
            length = named["attention_mask"].shape[1]
            named["attention_mask"] = block_causal(length, self.mask_blocks)
        return args, named

    def answer(self, request: dict[str, Any]) -> Answers:
        block_length = request["block_length"]
        self.mask_blocks = block_length if request["block_causal"] else 0
        tokens, forwards = [], []
        for prompt, gen_length in zip(request["prompts"], request["gen_lengths"], strict=True):
            self.forwards = 0
            found = self.pipeline(
                input_ids=torch.tensor([prompt]),
                gen_length=gen_length,
                block_length=block_length,
                num_inference_steps=block_length,
                threshold=request["threshold"],
                editing_threshold=None,
                sampling_method="greedy",
                eos_early_stop=False,
                mask_token_id=request["mask_id"],
                output_type="seq",
            )
            tokens.append(found.sequences[0].tolist())
            forwards.append(self.forwards)
        return tokens, forwards


class FastDLLM:
    """Fast-dLLM's generate functions; prompts of one length run as a batch if they can."""

    def __init__(self, checkpoint: str, code: str) -> None:
        # Early versions import einops, but no code that runs here uses it.
        sys.modules.setdefault("einops", types.SimpleNamespace(rearrange=None))  # type: ignore[arg-type]
        sys.path.insert(0, str(Path(code).parent))
        self.functions: Any = importlib.import_module("generate")
        config_class: Any = importlib.import_module("model.configuration_llada").LLaDAConfig
        model_class: Any = importlib.import_module("model.modeling_llada").LLaDAModelLM
        # transformers 5 no longer keeps these on every configuration.
        config_class.use_cache, config_class.use_return_dict = False, True
        config = json.loads((Path(checkpoint) / "config.json").read_text())
        load: Any = importlib.import_module("safetensors.torch").load_file
        weights = load(Path(checkpoint) / "model.safetensors")
        self.model = model_class(config_class(**config)).eval()
        self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        self.mask_id = config["mask_token_id"]
        self.batches = True

    def generate(self, prompts: Any, length: int, request: dict[str, Any]) -> Answers:
        cache = request["cache"]
        name = "generate" if cache == "none" else f"generate_with_{cache}_cache"
        canvas, forwards = getattr(self.functions, name)(
            self.model,
            torch.tensor(prompts),
            gen_length=length,
            mask_id=self.mask_id,
            **{"steps": length} | request["options"],
        )
        return canvas[:, len(prompts[0]) :].tolist(), [int(forwards)] * len(prompts)

    def answer(self, request: dict[str, Any]) -> Answers:
        prompts, lengths = request["prompts"], request["gen_lengths"]
        if self.batches and len(set(lengths)) == len(set(map(len, prompts))) == 1:
            try:
                return self.generate(prompts, lengths[0], request)
            except (RuntimeError, IndexError) as error:
                print(f"Fast-dLLM cannot run batches: {error}; one by one", file=sys.stderr)
                self.batches = False
        pairs = zip(prompts, lengths, strict=True)
        runs = [self.generate([prompt], length, request) for prompt, length in pairs]
        return [rows[0] for rows, _ in runs], [forwards[0] for _, forwards in runs]


def main() -> None:
    name, checkpoint, threads, code = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    kinds: dict[str, Any] = {"diffusers": Diffusers, "fast-dllm": FastDLLM}
    peer = kinds[name](checkpoint, code)
    for line in sys.stdin:
        request = json.loads(line)
        clock = time.process_time if request["cpu_time"] else time.perf_counter
        begin = clock()
        rows, forwards = peer.answer(request)
        print(json.dumps([clock() - begin, rows, forwards]), flush=True)


if __name__ == "__main__":
    main()
