"""Train a demo model: `python -m examples.train_demo.train llada_moe --out DIR`.

Masked diffusion on the answer, Muon and AdamW, a schedule in steps. DIR holds state.pt, from which
the same command resumes as if it had not stopped, and export/, a checkpoint folder. `--begin` names
the folder of another run, from whose averaged weights this one starts.
"""

import argparse
import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast

from diffray import DiffusionLLM
from diffray.components.checkpoints.demos import DEMOS, demo_path
from examples.train_demo.batches import Batch, Batches
from examples.train_demo.evaluate import run
from examples.train_demo.model import DemoModel, initialise, products_dtype, to_checkpoint
from examples.train_demo.muon import Muon
from examples.train_demo.tasks import TASKS, drawn
from examples.train_demo.tokenizer import load_tokenizer
from examples.train_demo.transfer import to_llada_moe

STEPS, PARTS = 40000, 2  # batches in a step
COPYING, FALL = 0.2, 0.5  # shares of the steps: mostly copying; with a falling rate
TEMPERATURE = 0.8  # of the loss; inference, at 1, is less confident and accepts fewer wrong tokens


def build_config(name: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the config of the shipped model of that layout, with the tokenizer's ids."""
    shipped = demo_path({layout: demo for demo, layout in DEMOS.items()}[name])
    assert shipped is not None
    config: dict[str, Any] = json.loads((shipped / "config.json").read_text())
    return config | {
        "vocab_size": len(tokenizer),
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def build_optimizers(model: DemoModel) -> list[Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the rest."""
    matrices: list[Tensor] = []
    pairs: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        matrix = ".layers." in name and parameter.dim() > 1 and "mlp.gate.weight" not in name
        (rest if not matrix else pairs if "w13" in name else matrices).append(parameter)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": pairs, "stacked": 2}]
    adam = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [Muon(groups, products_dtype(), lr=0.02), adam]


def learning_rate(step: int, steps: int, begun: int = 0, fall: float = FALL) -> float:
    """Return the share of the peak: warm up from step `begun`, hold, fall over the last steps."""
    return min(1.0, (step - begun + 1) / 100, max(0.005, (1 - step / steps) / fall))


def loss_of(model: DemoModel, batch: Batch) -> tuple[Tensor, float]:
    """Return the weighted loss with the routers' balance, and the share of right tokens."""
    chosen = batch.weight_BL > 0
    target, weight = batch.target_BL[chosen], batch.weight_BL[chosen]
    weight = weight / weight.sum()
    logits = model(batch.input_BL, chosen) / TEMPERATURE
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    right = ((logits.detach().argmax(-1) == target) * weight).sum()
    balance = sum((m.balance for m in model.moes), torch.zeros(()))
    return loss + 0.01 * balance, float(right)


def shift_bias(model: DemoModel) -> None:
    """Balance experts without a loss: choose busy ones a little less often from now on."""
    for moe in model.moes:
        load_E = moe.load_E.float()
        moe.gate.expert_bias += 0.001 * (load_E.mean() - load_E).sign()


def held_out(folder: Path, per_task: int) -> dict[str, float]:
    """Return exact match by task and tokens per forward on held-out items in trained phrasings."""
    items = drawn("entities", per_task * len(TASKS), 1234, TASKS)
    with DiffusionLLM(str(folder), dtype="float32") as llm:
        found = run(llm, items, 96)
    scores: dict[str, float] = found["exact_match_by_task"]
    return scores | {"tokens_per_forward": found["tokens_per_forward"]}


def export(model: DemoModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a checkpoint folder: bf16 weights, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t if name.endswith("expert_bias") else t.bfloat16()).contiguous().clone()
        for name, t in to_checkpoint(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.shape.config, indent=1) + "\n")
    generation = {"do_sample": False, "max_new_tokens": 128}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save_pretrained(folder)


class Part(NamedTuple):
    """What the log needs of a batch."""

    kind: str
    loss: float
    right: float


class Run:
    """A training run: all that a step changes, saved and loaded together."""

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = DemoModel(build_config(name, tokenizer), tokenizer.get_vocab())
        initialise(self.model)
        self.average = copy.deepcopy(self.model).eval()
        self.optimizers = build_optimizers(self.model)
        self.batches = Batches(tokenizer, self.model.shape.causal, seed, tokens)
        self.name, self.tokenizer, self.seed = name, tokenizer, seed
        self.begun, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0

    def part(self) -> Part:
        """Accumulate one batch's gradient."""
        batch = self.batches.next()
        loss, right = loss_of(self.model, batch)
        (loss / PARTS).backward()
        if self.model.shape.causal:
            shift_bias(self.model)
        self.tokens += batch.input_BL.numel()
        return Part(batch.kinds[0], float(loss.detach()), right)

    def train_step(self, steps: int, fall: float = FALL) -> list[Part]:
        """Run the next of `steps` steps."""
        begin = time.process_time()
        if self.step >= COPYING * steps:
            self.batches.turn_to_the_rest()
        scale = learning_rate(self.step, steps, self.begun, fall)
        for group in (g for o in self.optimizers for g in o.param_groups):
            group["lr"] = scale * group.setdefault("peak", group["lr"])
        parts = [self.part() for _ in range(PARTS)]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()),
                list(self.model.parameters()),
                1 / min((self.step - self.begun) // 5 + 2, 400),  # about the last fifth
            )
            for ours, theirs in zip(self.average.buffers(), self.model.buffers(), strict=True):
                ours.copy_(theirs)
        self.step += 1
        self.seconds += time.process_time() - begin
        return parts

    def save(self, path: Path) -> None:
        """Write everything, or leave the previous file as it is."""
        state = {
            "model": self.model.state_dict(), "average": self.average.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "batches": self.batches.state(),
            "counts": (self.begun, self.step, self.tokens, self.seconds),
            "name": self.name, "torch_rng": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.batches.load_state(state["batches"])
        self.begun, self.step, self.tokens, self.seconds = state["counts"]
        torch.set_rng_state(state["torch_rng"])

    def begin(self, path: Path) -> None:
        """Start from another run's average: its steps count, momentum and rate warm up again."""
        state = torch.load(path, weights_only=False)
        weights = state["average"]
        if (state["name"], self.name) == ("llada2_moe", "llada_moe"):
            weights = to_llada_moe(weights, self.model.state_dict(), self.model.shape)
        elif state["name"] != self.name:
            raise ValueError(f"{path} has the weights of {state['name']}, not of {self.name}")
        for model in (self.model, self.average):
            model.load_state_dict(weights)
        _, self.step, self.tokens, self.seconds = state["counts"]
        self.begun = self.step
        self.batches.rng.seed(f"{self.seed} {self.step}")  # draws new examples


class Log:
    """Running means of the loss and of right tokens, for drills and for the rest."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[float, float]] = {}

    def add(self, parts: list[Part]) -> None:
        for part in parts:
            kind = "drills" if part.kind == "drill" else "items"
            loss, right = self.means.get(kind, part[1:])
            self.means[kind] = 0.99 * loss + 0.01 * part.loss, 0.99 * right + 0.01 * part.right

    def __str__(self) -> str:
        return " ".join(
            f"{k} {loss:.3f}/{hits:.3f}" for k, (loss, hits) in sorted(self.means.items())
        )


def train(arguments: argparse.Namespace) -> Run:
    """Train to the last step, with regular saves."""
    torch.set_num_threads(1)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.begin and not (out / "tokenizer").exists():
        shutil.copytree(arguments.begin / "tokenizer", out / "tokenizer")
    tokenizer = load_tokenizer(out / "tokenizer")
    run = Run(arguments.model, tokenizer, arguments.seed, arguments.tokens)
    if (out / "state.pt").exists():
        run.load(out / "state.pt")
    elif arguments.begin:
        run.begin(arguments.begin / "state.pt")
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    log = Log()
    saved = evaluated = time.monotonic()
    while run.step < arguments.steps:
        log.add(run.train_step(arguments.steps, arguments.fall))
        done, now = run.step == arguments.steps, time.monotonic()
        where = f"{run.seconds:6.0f}s step {run.step} tokens {run.tokens / 1e6:.2f}M"
        if run.step % 100 == 0:
            print(f"{where} {log}", flush=True)
        if done or now > saved + 60 * arguments.save_every:
            saved = now
            run.save(out / "state.pt")
        if done or now > evaluated + 60 * arguments.evaluate_every:
            evaluated = now
            export(run.average, tokenizer, out / "export")
            scores = held_out(out / "export", arguments.evaluate_items)
            print(f"{where} held-out {scores}", flush=True)
    return run


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=DEMOS.values())
    parser.add_argument("--steps", type=int, default=STEPS, help="in all")
    parser.add_argument("--fall", type=float, default=FALL, help="share of steps, falling rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--begin", type=Path, help="another run to start from, if --out has no state.pt"
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens in each of a step's batches"
    )
    parser.add_argument("--save-every", type=float, default=8, help="minutes")
    parser.add_argument("--evaluate-every", type=float, default=25, help="minutes")
    parser.add_argument("--evaluate-items", type=int, default=9, help="of each task")
    return parser.parse_args(words)


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    train(parse())
