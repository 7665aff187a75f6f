"""Train a demo model: `python -m examples.train_demo.train llada_moe --out DIR`.

Masked diffusion on the answer, Muon and AdamW, a schedule in steps. DIR holds state.pt, from which
the same command resumes as if it had not stopped; export/, a checkpoint folder; and
begun.safetensors, from which `--begin` continues on another machine.
"""

import argparse
import copy
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast

from examples.train_demo.batches import Batch, Batches
from examples.train_demo.layouts import CONFIGS, build_config, initialise
from examples.train_demo.model import DemoModel, products_dtype, to_checkpoint
from examples.train_demo.muon import Muon
from examples.train_demo.sampler import generate
from examples.train_demo.tasks import TASKS, chat, draw
from examples.train_demo.tokenizer import load_tokenizer, wrap
from examples.train_demo.transfer import to_llada_moe

STEPS, PARTS = 40000, 2  # batches in a step
COPYING, FALL = 0.2, 0.5  # shares of the steps: mostly copying; with a falling rate
TEMPERATURE = 0.8  # of the loss; inference, at 1, is less confident and accepts fewer wrong tokens


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
    logits = model(batch.input_BL, None, chosen) / TEMPERATURE
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    right = ((logits.detach().argmax(-1) == target) * weight).sum()
    balance = sum((m.balance for m in model.moes), torch.zeros(()))
    return loss + 0.01 * balance, float(right)


def shift_bias(model: DemoModel) -> None:
    """Balance experts without a loss: choose busy ones a little less often from now on."""
    for moe in model.moes:
        load_E = moe.load_E.float()
        moe.gate.expert_bias += 0.001 * (load_E.mean() - load_E).sign()


def evaluate(
    model: DemoModel, tokenizer: PreTrainedTokenizerFast, per_task: int, seed: int = 1234
) -> dict[str, float]:
    """Return exact match by task and tokens per forward on held-out items in trained phrasings."""
    rng = random.Random(seed)
    scores: dict[str, float] = {}
    tokens = forwards = 0
    for task in TASKS:
        items = [draw(rng, task, "entities") for _ in range(per_task)]
        prompts: Any = tokenizer.apply_chat_template(
            [chat(item) for item in items], add_generation_prompt=True, return_dict=False
        )
        samples = generate(model, prompts, 96, tokenizer.mask_token_id, tokenizer.eos_token_id)
        answers = [str(tokenizer.decode(sample.tokens)).strip() for sample in samples]
        hits = [a == item.answer for a, item in zip(answers, items, strict=True)]
        scores[task] = round(sum(hits) / per_task, 3)
        tokens += sum(len(sample.tokens) for sample in samples)
        forwards += sum(sample.forwards for sample in samples)
    return scores | {"tokens_per_forward": round(tokens / forwards, 2)}


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
            "begun": self.begun, "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
            "torch_rng": torch.get_rng_state(),
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
        self.begun, self.step = state["begun"], state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        torch.set_rng_state(state["torch_rng"])

    def keep(self, path: Path) -> None:
        """Write the averaged weights in bfloat16, for a run on another machine to start from."""
        metadata = {
            "model": self.name, "step": str(self.step), "tokens": str(self.tokens),
            "seconds": f"{self.seconds:.0f}",
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
        }  # fmt: skip
        tensors = {name: t.detach().bfloat16() for name, t in trained(self.average).items()}
        save_file(tensors, path.with_suffix(".new"), metadata=metadata)
        path.with_suffix(".new").replace(path)

    def begin(self, path: Path) -> None:
        """Continue from kept weights: the step count goes on, momentum and rate warm up again."""
        metadata, tensors = read_metadata(path), load_file(path)
        if (metadata["model"], self.name) == ("llada2_moe", "llada_moe"):
            tensors = to_llada_moe(tensors, trained(self.model))
        elif metadata["model"] != self.name:
            raise ValueError(f"{path} has the weights of {metadata['model']}, not of {self.name}")
        for model in (self.model, self.average):
            for name, tensor in trained(model).items():
                tensor.data.copy_(tensors[name])
        self.begun = self.step = int(metadata["step"])
        self.tokens, self.seconds = int(metadata["tokens"]), float(metadata["seconds"])
        self.batches.rng.seed(f"{self.seed} {self.step}")  # draws new examples


def trained(model: DemoModel) -> dict[str, Tensor]:
    """Return the tensors that training changes."""
    biases = {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return dict(model.named_parameters()) | biases


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


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
        begun_with = read_metadata(arguments.begin)["tokenizer"]
        wrap(Tokenizer.from_str(begun_with)).save_pretrained(out / "tokenizer")
    tokenizer = load_tokenizer(out / "tokenizer")
    run = Run(arguments.model, tokenizer, arguments.seed, arguments.tokens)
    if (out / "state.pt").exists():
        run.load(out / "state.pt")
    elif arguments.begin:
        run.begin(arguments.begin)
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
            run.keep(out / "begun.safetensors")
        if done or now > evaluated + 60 * arguments.evaluate_every:
            evaluated = now
            scores = evaluate(run.average, tokenizer, arguments.evaluate_items)
            print(f"{where} held-out {scores}", flush=True)
            export(run.average, tokenizer, out / "export")
    return run


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--steps", type=int, default=STEPS, help="in all")
    parser.add_argument("--fall", type=float, default=FALL, help="share of steps, falling rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--begin", type=Path, help="kept weights to start from, if --out has no state.pt"
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
