"""Runs diffusers' LLaDA2Pipeline, in its own environment, for requests given as lines of JSON.

A request holds prompts (token ids, one pipeline call each), the tokens to write for each, a block
length, a threshold, and whether the model gets LLaDA2's own block-causal mask. The pipeline passes
a two-dimensional mask, from which the published model code makes a causal one, or none at all if no
position is padded.
"""

import importlib
import json
import sys
import time
from typing import Any

import torch

MASKED = torch.finfo(torch.float32).min


def block_causal(length: int, block_length: int) -> torch.Tensor:
    """Return the mask that is added to scores: 0 up to the end of a query's own block."""
    blocks = torch.arange(length) // block_length
    seen = blocks.unsqueeze(0) <= blocks.unsqueeze(1)
    return torch.zeros(1, 1, length, length).masked_fill(~seen, MASKED)


class Runner:
    """The pipeline on one checkpoint, and the number of forwards that its model has run."""

    def __init__(self, folder: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        diffusers: Any = importlib.import_module("diffusers")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, torch_dtype=torch.float32
        ).eval()
        scheduler = diffusers.BlockRefinementScheduler()
        self.pipeline: Any = diffusers.LLaDA2Pipeline(model=model, scheduler=scheduler)
        self.pipeline.set_progress_bar_config(disable=True)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.forwards = 0
        self.mask_blocks: int | None = None

    def _before(self, module: Any, args: Any, named: dict[str, Any]) -> Any:
        self.forwards += 1
        if self.mask_blocks is not None:
            length = named["attention_mask"].shape[1]
            named["attention_mask"] = block_causal(length, self.mask_blocks)
        return args, named

    def run(self, request: dict[str, Any]) -> tuple[float, list[list[int]], list[int]]:
        """Return the seconds, and each prompt's tokens and forwards."""
        block_length = request["block_length"]
        self.mask_blocks = block_length if request["block_causal"] else None
        tokens, forwards = [], []
        begin = time.perf_counter()
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
        return time.perf_counter() - begin, tokens, forwards


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    runner = Runner(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(runner.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
