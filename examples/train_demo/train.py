"""Train a demo model: `python -m examples.train_demo.train llada_moe --out DIR`.

Masked diffusion on the answer, Muon and AdamW, a schedule keyed to the wall clock. DIR holds
state.pt, from which the same command resumes, and export/, which is a checkpoint folder.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

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
from examples.train_demo.tasks import held_out_items
from examples.train_demo.tokenizer import load_tokenizer

HIDDEN, LAYERS, HEADS, HEAD_DIM, EXPERTS = 128, 5, 8, 32, 16
SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM, "num_experts": EXPERTS, "hidden_act": "silu", "rope_theta": 300.0,
    "rope_scaling": None, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada_moe": SHARED | {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "num_key_value_heads": HEADS,
        "num_experts_per_tok": 4, "expert_intermediate_size": 80, "dense_intermediate_size": 320,
        "shared_expert_intermediate_size": None, "rms_norm_eps": 1e-5, "norm_topk_prob": None,
        "qk_layernorm": True, "moe_layer_freq": [1] * LAYERS,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    },
    "llada2_moe": SHARED | {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe",
        "num_key_value_heads": HEADS // 2,
        "num_experts_per_tok": 2, "intermediate_size": 320, "moe_intermediate_size": 96,
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
            std *= EXPERTS / 4  # a plain softmax gives each of the four chosen about 1/16
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
    return [Muon(matrices, lr=0.02), adam]


def learning_rate(step: int, done: float) -> float:
    """The share of the peak: warm up, hold, and fall linearly over the last half of the time."""
    return min(1.0, (step + 1) / 100, max(0.01, (1 - done) / 0.5))


def loss_of(model: DemoModel, batch: Batch) -> tuple[Tensor, float]:
    length = batch.input_BL.shape[1]
    mask = block_causal(length, BLOCK) if model.shape.causal else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(batch.input_BL, mask)
        chosen = batch.weight_BL > 0
        logits = model.vocabulary.logits(hidden[chosen])
    target, weight = batch.target_BL[chosen], batch.weight_BL[chosen]
    loss = (F.cross_entropy(logits.float(), target, reduction="none") * weight).sum() / weight.sum()
    right = ((logits.argmax(-1) == target) * weight).sum() / weight.sum()
    balance = sum((m.balance for m in model.moes), torch.zeros(()))
    return loss + 0.01 * balance, float(right)


def shift_bias(model: DemoModel) -> None:
    """Loss-free balancing: busy experts are chosen a little less from now on."""
    for moe in model.moes:
        load_E = moe.load_E.float()
        moe.gate.expert_bias += 0.001 * (load_E.mean() - load_E).sign()


def evaluate(
    model: DemoModel, tokenizer: PreTrainedTokenizerFast, count: int, max_tokens: int
) -> dict[str, float]:
    """Exact match by task and tokens per forward on held-out items."""
    items = held_out_items(count)
    right: dict[str, list[bool]] = {}
    tokens = forwards = 0
    for at in range(0, count, 15):
        group = items[at : at + 15]
        chats = [[{"role": "user", "content": item.question}] for item in group]
        prompts: Any = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=False
        )
        samples = generate(
            model, prompts, max_tokens, tokenizer.mask_token_id, tokenizer.eos_token_id
        )
        for item, sample in zip(group, samples, strict=True):
            answer = str(tokenizer.decode(sample.tokens)).strip()
            right.setdefault(item.task, []).append(answer == item.answer)
            tokens, forwards = tokens + len(sample.tokens), forwards + sample.forwards
    scores = {task: sum(hits) / len(hits) for task, hits in right.items()}
    scores["all"] = sum(sum(hits) for hits in right.values()) / count
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
    generation = {"do_sample": False, "max_new_tokens": 128}  # the longest canvases in training
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save_pretrained(folder)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(out / "tokenizer")
    model = DemoModel(build_config(arguments.model, tokenizer), tokenizer.get_vocab())
    initialise(model)
    average = copy.deepcopy(model).eval()
    optimizers = build_optimizers(model)
    step, items, spent = 0, 0, 0.0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, items, spent = state["step"], state["items"], state["spent"]
    batches = Batches(
        tokenizer, model.shape.causal, arguments.seed + step, arguments.tokens, arguments.drills
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    begin = time.monotonic() - spent
    budget = 60 * arguments.minutes
    logged: dict[bool, tuple[float, float]] = {}
    next_eval = spent + 60 * arguments.evaluate_every
    for batch in batches:
        now = time.monotonic() - begin
        scale = learning_rate(step, now / budget)
        if now > budget / 2:
            batches.turn_to_sums()
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = scale * group.setdefault("peak", group["lr"])
        loss, right = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if model.shape.causal:
            shift_bias(model)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.parameters()), list(model.parameters()), 1 / min(step + 2, 400)
            )
            for ours, theirs in zip(average.buffers(), model.buffers(), strict=True):
                ours.copy_(theirs)
        step, items = step + 1, items + batch.items
        mean, hits = logged.get(batch.kind == "drill", (float(loss.detach()), right))
        logged[batch.kind == "drill"] = (
            0.98 * mean + 0.02 * float(loss.detach()), 0.98 * hits + 0.02 * right,
        )  # fmt: skip
        if step % 200 == 0:
            notes = " ".join(
                f"{'drill' if k else 'items'} {a:.3f}/{b:.3f}" for k, (a, b) in logged.items()
            )
            print(f"{now:6.0f}s step {step} items {items} {notes}", flush=True)
        if now > next_eval or now > budget:
            next_eval = now + 60 * arguments.evaluate_every
            scores = evaluate(average, tokenizer, arguments.evaluate_items, 96)
            print(f"{now:6.0f}s step {step} items {items} held-out {scores}", flush=True)
            export(average, tokenizer, out / "export")
            state = {
                "model": model.state_dict(), "average": average.state_dict(), "items": items,
                "optimizers": [o.state_dict() for o in optimizers], "step": step, "spent": now,
            }  # fmt: skip
            torch.save(state, out / "state.new")
            (out / "state.new").replace(out / "state.pt")
        if now > budget:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--minutes", type=float, default=150, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a batch")
    parser.add_argument("--drills", type=float, default=0.15, help="share of drill batches")
    parser.add_argument("--evaluate-every", type=float, default=8, help="minutes")
    parser.add_argument("--evaluate-items", type=int, default=60)
    train(parser.parse_args())
