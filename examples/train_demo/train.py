"""Train a demo model: `python -m examples.train_demo.train llada_moe --out DIR`.

Masked diffusion on the answer, Muon and AdamW, a schedule in steps. DIR holds state.pt, from which
the same command resumes as if it had not stopped, and export/, which is a checkpoint folder.
"""

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast

from examples.train_demo.batches import Batch, Batches
from examples.train_demo.model import DemoModel, block_causal, to_checkpoint
from examples.train_demo.muon import Muon
from examples.train_demo.sampler import BLOCK, generate
from examples.train_demo.tasks import GENERATORS, chat, draw
from examples.train_demo.tokenizer import load_tokenizer


def products_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it in hardware, else float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


STEPS, PARTS = 14000, 2  # batches in a step
COPYING, FALL = 0.2, 0.5  # shares of the steps: mostly copying; the falling rate
PRODUCTS = products_dtype()
HIDDEN, LAYERS, HEADS, HEAD_DIM, EXPERTS = 128, 6, 8, 32, 16
SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HEAD_DIM, "num_experts": EXPERTS, "hidden_act": "silu", "rope_theta": 300.0,
    "rope_scaling": None, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada_moe": SHARED | {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "num_experts_per_tok": 2,
        "expert_intermediate_size": 96, "dense_intermediate_size": 256,
        "shared_expert_intermediate_size": None, "rms_norm_eps": 1e-5, "norm_topk_prob": None,
        "qk_layernorm": True, "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    },
    "llada2_moe": SHARED | {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe",
        "num_experts_per_tok": 2, "intermediate_size": 256, "moe_intermediate_size": 80,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "use_qkv_bias": False, "use_qk_norm": True, "use_bias": False,
        "embedding_dropout": 0.0, "output_dropout": 0.0, "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid", "router_dtype": "fp32", "block_length": BLOCK,
    },
}  # fmt: skip


def build_config(name: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return CONFIGS[name] | {
        "vocab_size": len(tokenizer),
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def initialise(model: DemoModel) -> None:
    for name, parameter in model.model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = parameter.shape[-1] ** -0.5
        if any(part in name for part in ("o_proj", "attention.dense", "w2", "down_proj")):
            std /= math.sqrt(2 * LAYERS)
        if "w2" in name and not model.shape.causal:
            std *= EXPERTS / 2  # a plain softmax gives each of the two chosen about 1/16
        if "mlp.gate.weight" in name:
            std = 0.02
        torch.nn.init.normal_(parameter, std=std)


def build_optimizers(model: DemoModel) -> list[Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        matrix = ".layers." in name and parameter.dim() > 1 and "mlp.gate.weight" not in name
        (matrices if matrix else rest).append(parameter)
    adam = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [Muon(matrices, PRODUCTS, lr=0.02), adam]


def learning_rate(step: int, steps: int) -> float:
    """The share of the peak: warm up, hold, and fall linearly over the last part of the steps."""
    return min(1.0, (step + 1) / 100, max(0.005, (1 - step / steps) / FALL))


def loss_of(model: DemoModel, batch: Batch) -> tuple[Tensor, float]:
    """The weighted loss with the routers' balance, and the share of right tokens."""
    length = batch.input_BL.shape[1]
    mask = block_causal(length, BLOCK) if model.shape.causal else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=PRODUCTS is torch.bfloat16):
        chosen = batch.weight_BL > 0
        logits = model(batch.input_BL, mask, chosen)
    target, weight = batch.target_BL[chosen], batch.weight_BL[chosen]
    loss = (F.cross_entropy(logits.float(), target, reduction="none") * weight).sum() / weight.sum()
    right = ((logits.detach().argmax(-1) == target) * weight).sum() / weight.sum()
    balance = sum((m.balance for m in model.moes), torch.zeros(()))
    return loss + 0.01 * balance, float(right)


def shift_bias(model: DemoModel) -> None:
    """Loss-free balancing: busy experts are chosen a little less from now on."""
    for moe in model.moes:
        load_E = moe.load_E.float()
        moe.gate.expert_bias += 0.001 * (load_E.mean() - load_E).sign()


def evaluate(
    model: DemoModel, tokenizer: PreTrainedTokenizerFast, per_task: int, seed: int = 1234
) -> dict[str, float]:
    """Exact match by task and tokens per forward on held-out items of trained phrasings."""
    rng = random.Random(seed)
    scores: dict[str, float] = {}
    tokens = forwards = 0
    for task in GENERATORS:
        items = [draw(rng, task, "entities") for _ in range(per_task)]
        prompts: Any = tokenizer.apply_chat_template(
            [chat(item) for item in items], add_generation_prompt=True, return_dict=False
        )
        samples = generate(model, prompts, 64, tokenizer.mask_token_id, tokenizer.eos_token_id)
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
    generation = {"do_sample": False, "max_new_tokens": 64}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save_pretrained(folder)


class Part(NamedTuple):
    """What a batch is logged with."""

    kind: str
    loss: float
    right: float


class Run:
    """A training run: all that a step changes, saved and loaded as a whole."""

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = DemoModel(build_config(name, tokenizer), tokenizer.get_vocab())
        initialise(self.model)
        self.average = copy.deepcopy(self.model).eval()
        self.optimizers = build_optimizers(self.model)
        self.batches = Batches(tokenizer, self.model.shape.causal, seed, tokens)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def part(self) -> Part:
        """Add one batch's gradient."""
        batch = self.batches.next()
        loss, right = loss_of(self.model, batch)
        (loss / PARTS).backward()
        if self.model.shape.causal:
            shift_bias(self.model)
        self.tokens += batch.input_BL.numel()
        return Part(batch.kinds[0], float(loss.detach()), right)

    def train_step(self, steps: int) -> list[Part]:
        """One step of `steps`."""
        begin = time.process_time()
        if self.step >= COPYING * steps:
            self.batches.turn_to_the_rest()
        scale = learning_rate(self.step, steps)
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
                1 / min(self.step + 2, 400),
            )
            for ours, theirs in zip(self.average.buffers(), self.model.buffers(), strict=True):
                ours.copy_(theirs)
        self.step += 1
        self.seconds += time.process_time() - begin
        return parts

    def save(self, path: Path) -> None:
        """Write everything, or leave the file before as it is."""
        state = {
            "model": self.model.state_dict(), "average": self.average.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "batches": self.batches.state(),
            "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
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
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        torch.set_rng_state(state["torch_rng"])


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


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(out / "tokenizer")
    run = Run(arguments.model, tokenizer, arguments.seed, arguments.tokens)
    if (out / "state.pt").exists():
        run.load(out / "state.pt")
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    log = Log()
    saved = evaluated = run.seconds
    while run.step < arguments.steps:
        log.add(run.train_step(arguments.steps))
        done = run.step == arguments.steps
        where = f"{run.seconds:6.0f}s step {run.step} tokens {run.tokens / 1e6:.2f}M"
        if run.step % 100 == 0:
            print(f"{where} {log}", flush=True)
        if done or run.seconds > saved + 60 * arguments.save_every:
            saved = run.seconds
            run.save(out / "state.pt")
        if done or run.seconds > evaluated + 60 * arguments.evaluate_every:
            evaluated = run.seconds
            scores = evaluate(run.average, tokenizer, arguments.evaluate_items)
            print(f"{where} held-out {scores}", flush=True)
            export(run.average, tokenizer, out / "export")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--steps", type=int, default=STEPS, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens in each of a step's batches"
    )
    parser.add_argument("--save-every", type=float, default=4, help="minutes of processor time")
    parser.add_argument(
        "--evaluate-every", type=float, default=20, help="minutes of processor time"
    )
    parser.add_argument("--evaluate-items", type=int, default=24, help="of each task")
    train(parser.parse_args())
