"""What the offline benchmarks have the engine do: prompts as ids, and parameters."""

import random
from collections.abc import Sequence

from diffray.cluster.bench.flags import Data
from diffray.cluster.bench.prompts import RANDOM, Ask, by_task, read_asks
from diffray.components.params import SamplingParams
from diffray.workers.llm import DiffusionLLM


def random_ids(llm: DiffusionLLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of ids drawn from the vocabulary, without end tokens and the mask."""
    limits = llm.engine.limits
    barred = {*limits.eos_token_ids, limits.mask_token_id}
    allowed = [id for id in range(limits.spec.vocab_size) if id not in barred]
    draws = random.Random(seed)
    return [draws.choices(allowed, k=length) for _ in range(count)]


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


def tasks(
    llm: DiffusionLLM, data: Data, *, seed: int, raw: bool, params: SamplingParams
) -> dict[str, tuple[list[list[int]], list[SamplingParams]]]:
    """Return each task's prompts and parameters, all checked before the first is run."""
    found: dict[str, tuple[list[list[int]], list[SamplingParams]]] = {}
    for name in data.dataset_name.split(","):
        if name == RANDOM:
            wishes = [params.model_copy(update={"ignore_eos": True})] * data.num_prompts
            found[name] = random_ids(llm, data.num_prompts, data.input_len, seed), wishes
            continue
        own = data.dataset_path if name in ("custom", "sharegpt") else None
        for task, asks in by_task(read_asks(name, own, data.num_prompts)).items():
            wishes = [_with_length(params, ask.max_tokens) for ask in asks]
            found[task] = as_ids(llm, asks, raw=raw), wishes
    return found
