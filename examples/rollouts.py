"""Reinforcement learning in one process: the demo model learns to maximize a reward.

Each step samples answers, scores them, and follows the policy gradient: tokens of an answer that
beats its siblings become more probable, each on the canvas on which it was chosen, which the
trajectory records. Then the engine gets the new weights.

    python -m examples.rollouts --steps 10

Shapes: N canvases, L length, W positions decided on them, V vocabulary.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from diffray import CompletionOutput, DiffusionLLM, RequestOutput, SamplingParams
from diffray.components.checkpoints.folder import resolve
from examples.train_demo.model import Body, DemoModel, Shape, to_checkpoint

PROMPTS = ("The", "Once there was", "Write a list of", "Tom and Lily")
LENGTH, FORWARDS, TEMPERATURE = 16, 4, 1.5


def sampling(choices: int, seed: int) -> SamplingParams:
    """Return parameters with which each forward runs the whole block and decides several tokens."""
    return SamplingParams(
        n=choices,
        seed=seed,
        temperature=TEMPERATURE,
        max_tokens=LENGTH,
        min_tokens=LENGTH,  # no end tokens: they have no text to reward
        logprobs=True,
        diffusion={
            "block_length": LENGTH,
            "decoder": {"kind": "fixed", "steps": FORWARDS, "remasking": "random"},
            "cache": {"kind": "none"},
        },
    )


def reward(answer: CompletionOutput) -> float:
    """Return the share of tokens with the letter e: a stand-in for your own judge."""
    return sum("e" in text for text in answer.tokens) / len(answer.tokens)


class Table(nn.Module):
    """The checkpoint's embedding and head, in place of the features that it was trained with."""

    def __init__(self, embedding_VH: Tensor, head_VH: Tensor) -> None:
        super().__init__()
        self.embedding_VH, self.head_VH = nn.Parameter(embedding_VH), nn.Parameter(head_VH)

    def embedding(self) -> Tensor:
        return self.embedding_VH

    def head(self, table_VH: Tensor) -> Tensor:
        return self.head_VH


class Policy(DemoModel):
    """A checkpoint as a model with gradients."""

    def __init__(self, folder: Path) -> None:
        nn.Module.__init__(self)
        files = folder.glob("*.safetensors")
        given = {name: each.float() for file in files for name, each in load_file(file).items()}
        self.shape = Shape(json.loads((folder / "config.json").read_text()))
        self.vocabulary = Table(  # type: ignore[assignment]  # it has the same methods
            given["model.embed_tokens.weight"], given["lm_head.weight"]
        )
        self.model = Body(self.shape)
        own = self.model.state_dict(prefix="model.")
        self.load_state_dict({name: stacked(name, len(own[name]), given) for name in own}, False)


def stacked(name: str, count: int, given: dict[str, Tensor]) -> Tensor:
    """Return a tensor of the model, which stacks the checkpoint's experts."""
    place, _, last = name.rpartition(".")
    if not last.endswith("_experts"):
        return given[name]
    parts = ("gate", "up") if last == "w13_experts" else ("down",)
    experts = (
        torch.cat([given[f"{place}.experts.{number}.{part}_proj.weight"] for part in parts])
        for number in range(count)
    )
    return torch.stack([*experts])


def canvases(output: RequestOutput, mask: int) -> Iterator[tuple[int, list[int], list[bool]]]:
    """Yield the number of a choice, each of its canvases, and the positions decided on it."""
    prompt = output.prompt_token_ids
    before = [False] * len(prompt)
    for number, choice in enumerate(output.outputs):
        written = list(zip(choice.token_ids, choice.steps, strict=True))
        for now in sorted({*choice.steps}):
            shown = [token if step < now else mask for token, step in written]
            yield number, prompt + shown, before + [step == now for _, step in written]


def logprobs(
    model: DemoModel,
    output: RequestOutput,
    mask: int,
    ends: list[int],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's choice, its place, and its log-probability on its canvas."""
    choice_N, ids_NL, decided_NL = map(torch.tensor, zip(*canvases(output, mask), strict=True))
    logits_WV = model(ids_NL, decided_NL) / temperature
    logits_WV[:, ends] = -torch.inf  # sampling did not allow them
    row_W, at_W = decided_NL.nonzero(as_tuple=True)
    tokens = torch.tensor([choice.token_ids for choice in output.outputs])
    choice_W, place_W = choice_N[row_W], at_W - len(output.prompt_token_ids)
    found = F.log_softmax(logits_WV, -1).gather(1, tokens[choice_W, place_W].unsqueeze(1))
    return choice_W, place_W, found.squeeze(1)


def loss(model: DemoModel, outputs: list[RequestOutput], mask: int, ends: list[int]) -> Tensor:
    """Return the policy gradient's loss: an answer's weight is how much it beats its siblings."""
    total = torch.zeros(())
    for output in outputs:
        rewards = torch.tensor([reward(choice) for choice in output.outputs])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        choice_W, _, found_W = logprobs(model, output, mask, ends, TEMPERATURE)
        total = total - (advantages[choice_W] * found_W).mean()
    return total / len(outputs)


def rollouts(
    steps: int, choices: int = 12, seed: int = 0, learning_rate: float = 1e-3
) -> Iterator[list[float]]:
    """Yield the rewards of each step's answers, and finally those of the trained model."""
    with DiffusionLLM("demo", dtype="float32", device="cpu") as llm:
        mask, ends = llm.limits.mask_token_id, [*llm.limits.eos_token_ids]
        model = Policy(resolve(llm.model))
        optimizer = torch.optim.Adam(model.parameters(), learning_rate, betas=(0.9, 0.95))
        for step in range(steps + 1):
            params = sampling(choices, seed + 1000 * step)
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
            assert {output.weights_version for output in outputs} == {str(step)}
            yield [reward(choice) for output in outputs for choice in output.outputs]
            if step == steps:
                return
            optimizer.zero_grad()
            loss(model, outputs, mask, ends).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(to_checkpoint(model))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--choices", type=int, default=12, help="answers to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for step, found in enumerate(rollouts(given.steps, given.choices, given.seed)):
        print(f"step {step}: mean reward {mean(found):.3f}", flush=True)


if __name__ == "__main__":
    main()
