"""What the offline benchmarks have the engine do: prompts as ids, and parameters."""

import random
from collections.abc import Sequence

from diffray.cluster.cli.bench.flags import Data
from diffray.cluster.cli.bench.percentiles import span
from diffray.cluster.cli.bench.prompts import RANDOM, Ask, by_task
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.components.policy import Policy


def random_ids(
    llm: DiffusionLLM, count: int, length: int, seed: int, prefix_len: int = 0
) -> list[list[int]]:
    """Return prompts of ids drawn from the vocabulary, without end tokens and the mask.

    All begin with the same `prefix_len` ids, before `length` of their own.
    """
    limits = llm.engine.limits
    barred = {*limits.eos_token_ids, limits.mask_token_id}
    allowed = [id for id in range(limits.spec.vocab_size) if id not in barred]
    draws = random.Random(seed)
    prefix = draws.choices(allowed, k=prefix_len)
    return [prefix + draws.choices(allowed, k=length) for _ in range(count)]


def as_ids(llm: DiffusionLLM, asks: Sequence[Ask], *, raw: bool) -> list[list[int]]:
    """Return the prompts as ids, as chat messages where the model has a chat template."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json, so it takes --dataset-name random")
    if raw or not tokenizer.fast.chat_template:
        return [tokenizer.encode(ask.prompt) for ask in asks]
    return [tokenizer.encode_chat([{"role": "user", "content": ask.prompt}]) for ask in asks]


def _with_length(params: SamplingParams, told: int | None) -> SamplingParams:
    """Return the parameters with the file's length, where nobody typed another."""
    if told is None or "max_tokens" in params.model_fields_set:
        return params
    return params.model_copy(update={"max_tokens": told})


def facts_of(
    llm: DiffusionLLM,
    params: SamplingParams,
    work: dict[str, tuple[list[list[int]], list[SamplingParams]]],
) -> dict[str, str]:
    """Return what a report says of the work, typed or not: its lengths and how it is denoised."""
    policy = Policy.resolve(params.diffusion, llm.engine.limits.spec)
    facts = {
        "block length": str(policy.block_length),
        "decoder": policy.decoder.model_dump_json(),
        "iteration": policy.iteration.model_dump_json(),
        "cache": policy.cache.model_dump_json(),
        "cfg scale": f"{policy.cfg_scale:g}",
    }
    for name, (prompts, wishes) in work.items():
        read, most = span(map(len, prompts)), span(wish.max_tokens for wish in wishes)
        facts[f"requests of {name}"] = (
            f"{len(prompts)}, prompts of {read} tokens, max_tokens {most}"
        )
    return facts


def tasks(
    llm: DiffusionLLM,
    sets: Sequence[tuple[str, list[Ask]]],
    data: Data,
    *,
    seed: int,
    raw: bool,
    params: SamplingParams,
) -> dict[str, tuple[list[list[int]], list[SamplingParams]]]:
    """Return each task's prompts and parameters, all checked before the first is run."""
    found: dict[str, tuple[list[list[int]], list[SamplingParams]]] = {}
    for name, read in sets:
        if name == RANDOM:
            typed = "ignore_eos" in params.model_fields_set
            wish = params if typed else params.model_copy(update={"ignore_eos": True})
            wishes = [wish] * data.num_prompts
            sizes = data.num_prompts, data.input_len, seed, data.random_prefix_len
            found[name] = random_ids(llm, *sizes), wishes
            continue
        for task, asks in by_task(read).items():
            wishes = [_with_length(params, ask.max_tokens) for ask in asks]
            found[task] = as_ids(llm, asks, raw=raw), wishes
    return found
