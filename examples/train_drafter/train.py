"""Train a drafter for a model on its own answers.

    python -m examples.train_drafter.train MODEL ANSWERS --mask-token-id N --out DIR

DIR is an adapter's folder, with state.pt beside its files, from which the same command goes on. An
answer's hidden keys and values come from a forward without the adapter; masks behind every position
then guess the tokens after the next, and the loss is theirs alone.

Letters: T tokens of a text, A positions after which masks are put, M masks after each, R = A * M.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

MODULES: Final = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
WEIGHTS: Final = "adapter_model.safetensors"
NAMED: Final = "base_model.model.{}.lora_{}.weight"
MASKS: Final = 2  # behind a position
SHARES: Final = torch.tensor([1.0, 0.6])  # of the loss: a later guess counts less often
ANCHORS: Final = 128  # positions of a text, one after the other
TEXTS: Final = 2  # of a step
KEPT_EVERY: Final = 120.0  # seconds
EVALUATED_EVERY: Final = 600.0


class Guesses(NamedTuple):
    """What the masks guess, what is right, and which masks of their groups they are."""

    logits_RV: Tensor
    right_R: Tensor
    model_RV: Tensor  # the model's own probabilities
    which_R: Tensor

    def loss(self) -> Tensor:
        """Return half the loss of the right tokens, and half that of the model's distribution."""
        log_RV, weight_R = self.logits_RV.log_softmax(-1), SHARES[self.which_R]
        own_R = log_RV.gather(1, self.right_R[:, None]).squeeze(1)
        own_R = (own_R + (log_RV * self.model_RV).sum(-1)) / 2
        return -(own_R * weight_R).sum() / weight_R.sum()


class Drafter:
    """A frozen model, and an adapter that can be turned on."""

    def __init__(self, model: str, rank: int, mask_token_id: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model.requires_grad_(False).eval()
        self.rank, self.mask, self.on = rank, mask_token_id, False
        self.sides: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] in MODULES:
                down = torch.randn(rank, module.in_features) * module.in_features**-0.5
                up = torch.zeros(module.out_features, rank)
                self.sides[name] = nn.Parameter(down), nn.Parameter(up)
                module.register_forward_hook(self._added(name))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [side for both in self.sides.values() for side in both]

    def _added(self, name: str) -> Any:
        def add(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not self.on:
                return out
            down, up = (side.to(out.dtype) for side in self.sides[name])
            more: Tensor = functional.linear(functional.linear(given[0], down), up)
            return out + 2 * more

        return add

    def guess(self, prompt: list[int], ids: list[int], most: int, rng: random.Random) -> Guesses:
        """Put masks behind positions of an answer, from the prompt's last one on."""
        text_T = torch.tensor(prompt + ids)
        length = len(text_T)
        at_A = torch.arange(len(prompt) - 1, length - 2)  # a mask guesses the second token after it
        if len(at_A) > most:
            first = rng.randrange(len(at_A) - most + 1)
            at_A = at_A[first : first + most]
        which_R = torch.arange(MASKS).repeat(len(at_A))
        own_R = at_A.repeat_interleave(MASKS)
        place_R = own_R + 1 + which_R
        seen_RT = torch.arange(length) <= own_R[:, None]
        seen_RR = (own_R[:, None] == own_R) & (which_R <= which_R[:, None])
        seen = torch.cat([seen_RT, seen_RR], dim=1)
        added = torch.zeros(seen.shape, dtype=self.model.dtype).masked_fill(~seen, -torch.inf)
        cache = DynamicCache()
        valid_R = place_R + 1 < length
        with torch.no_grad():
            known = self.model.model(input_ids=text_T[None], past_key_values=cache, use_cache=True)
            own = self.model.lm_head(known.last_hidden_state[0, at_A[0] + 1 :]).float().softmax(-1)
        self.on = True
        try:
            hidden = self.model.model(
                input_ids=torch.full((1, len(place_R)), self.mask),
                position_ids=place_R[None],
                attention_mask=added[None, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[0]
        finally:
            self.on = False
        logits, at_R = self.model.lm_head(hidden[valid_R]).float(), place_R[valid_R]
        return Guesses(logits, text_T[at_R + 1], own[at_R - at_A[0] - 1], which_R[valid_R])

    def load(self, folder: Path) -> None:
        """Take the numbers of an adapter that was saved here."""
        kept = load_file(folder / WEIGHTS)
        for name, both in self.sides.items():
            for letter, side in zip("AB", both, strict=True):
                side.data.copy_(kept[NAMED.format(name, letter)])

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does, with what diffray reads of a drafter."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            NAMED.format(name, letter): side.detach().bfloat16().contiguous()
            for name, both in self.sides.items()
            for letter, side in zip("AB", both, strict=True)
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": 2 * self.rank,
            "target_modules": MODULES,
            "bias": "none",
            "mask_token_id": self.mask,
            "block_size": MASKS,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def tokens_per_forward(right: list[list[bool]]) -> float:
    """Return what `introspective` makes of an answer's guesses, one list for each position.

    A forward whose drafts are all right drafts again; after a wrong one it writes one token.
    """
    at = forwards = 0
    while at < len(right):
        at, forwards = at + 1, forwards + 1
        whole = True
        while whole and at < len(right):
            guesses = right[at - 1]
            count = next((n for n, good in enumerate(guesses) if not good), len(guesses))
            whole = count == len(guesses)
            at, forwards = at + count + 1, forwards + 1
    return at / max(forwards, 1)


@torch.no_grad()
def evaluate(drafter: Drafter, held: list[dict[str, Any]]) -> str:
    """Return how many guesses are right on answers that were not learned from."""
    rates, shares = [], []
    for each in held:
        found = drafter.guess(each["prompt"], each["ids"], 10**6, random.Random(0))
        right_R = found.logits_RV.argmax(-1) == found.right_R
        groups: list[list[bool]] = []
        for which, good in zip(found.which_R.tolist(), right_R.tolist(), strict=True):
            if which == 0:
                groups.append([])
            groups[-1].append(good)
        rates.append(tokens_per_forward(groups))
        whole = [group for group in groups if len(group) == MASKS]
        shares.append(torch.tensor(whole).double().mean(0))
    guesses = ", ".join(f"{share:.3f}" for share in torch.stack(shares).mean(0).tolist())
    return f"right: {guesses}; tokens a forward: {sum(rates) / len(rates):.3f}"


def train(drafter: Drafter, texts: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Learn for the minutes asked for, counting those of earlier runs."""
    held = [each for each in texts if each["number"] % 20 == 0][:16]
    learned = [each for each in texts if each["number"] % 20]
    optimizer = torch.optim.AdamW(drafter.parameters, betas=(0.9, 0.98), weight_decay=0.0)
    state, step, seconds = args.out / "state.pt", 0, 0.0
    if state.is_file():
        kept = torch.load(state)
        step, seconds = kept["step"], kept["seconds"]
        optimizer.load_state_dict(kept["optimizer"])
        for mine, stored in zip(drafter.parameters, kept["parameters"], strict=True):
            mine.data.copy_(stored)
    begin, last = time.monotonic() - seconds, time.monotonic()
    evaluated = last
    while (seconds := time.monotonic() - begin) < 60 * args.minutes:
        share = min(1.0, (step + 1) / 20, max(0.02, 2 * (1 - seconds / 60 / args.minutes)))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * share
        rng, loss = random.Random(step), torch.zeros(())
        for _ in range(TEXTS):
            each = rng.choice(learned)
            found = drafter.guess(each["prompt"], each["ids"], ANCHORS, rng)
            part = found.loss() / TEXTS
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(drafter.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            print(f"step {step}, {seconds:.0f} s: loss {loss:.3f}", flush=True)
        if time.monotonic() - last > KEPT_EVERY:
            last = time.monotonic()
            made = state.with_suffix(".tmp")
            parts = [side.data for side in drafter.parameters]
            kept = {"step": step, "seconds": seconds, "parameters": parts}
            torch.save(kept | {"optimizer": optimizer.state_dict()}, made)
            os.replace(made, state)
            drafter.save(args.out)
            if last - evaluated > EVALUATED_EVERY:
                evaluated = last
                print(evaluate(drafter, held), flush=True)
    drafter.save(args.out)
    print(evaluate(drafter, held))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a folder that transformers loads")
    parser.add_argument("answers", type=Path, help="of examples.train_drafter.answers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--start", type=Path, help="an adapter's folder to begin with")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--minutes", type=float, default=75)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    texts = [json.loads(line) for line in args.answers.read_text().splitlines()]
    texts = [each for each in texts if len(each["ids"]) > MASKS + 2]
    drafter = Drafter(args.model, args.rank, args.mask_token_id)
    if args.start:
        drafter.load(args.start)
    train(drafter, texts, args)


if __name__ == "__main__":
    main()
