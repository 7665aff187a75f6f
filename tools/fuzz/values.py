"""Odd values for the fields of a body: everything that JSON can say, and some that it cannot."""

import random
from collections.abc import Callable
from typing import Any

SPECIAL = (
    "<|mask|>",
    "<|mdm_mask|>",
    "<|endoftext|>",
    "<|end|>",
    "<|role_end|>",
    "<role>ASSISTANT</role>",
    "{{ raise_exception('x') }}",
    "{% for x in range(99999) %}x{% endfor %}",
)
TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\u202e\u0000\u0007",
    "a\u0300" * 40,
    "\U0001f469\u200d\U0001f52c" * 9,
    "\uffff\ufffe",
    "null",
    "../../etc/passwd",
    "%s%n%x",
    "' OR 1=1 --",
    *SPECIAL,
)
NUMBERS: tuple[int | float, ...] = (
    *(0, -0.0, 1, -1, 2, 7, 8, 32, 0.5, 1.0, 1.5, 100, -101, 1e-320, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40, 10**4299),
    *(float("nan"), float("inf"), float("-inf")),
)
WORDS = ("auto", "none", "user", "assistant", "threshold", "dual", "exact", "soft", "kind", "x")
KINDS = (
    *("threshold", "fixed", "hierarchy", "credit", "factor", "edit", "schedule", "origin"),
    *("budget_threshold", "entropy_bound", "sequential"),
    *("none", "prefix", "dual", "vicinity", "exact", "sub_block"),
    *("blockwise", "first_token", "block_diffusion", "sub_blocks", "soft"),
)
PARAMETERS = (
    *("threshold", "steps", "low_threshold", "decay", "alpha", "boost", "factor"),
    *("before", "after", "warmup", "refresh", "early_stop"),
    *("steps_per_block", "sub_block_length", "gamma", "order", "preset"),
)


def text(rng: random.Random) -> str:
    pieces = rng.choices((*TEXTS, "abc", "how many? ", "\n", "\t", "e"), k=rng.randint(1, 4))
    return "".join(pieces)


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Return any JSON value."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(NUMBERS),
        lambda: rng.uniform(-200, 200),
        lambda: rng.randint(-(10**6), 10**6),
        lambda: text(rng),
        lambda: rng.choice(WORDS),
    ]
    if depth:
        makers += [
            lambda: [anything(rng, depth - 1) for _ in range(rng.randint(0, 4))],
            lambda: {text(rng): anything(rng, depth - 1) for _ in range(rng.randint(0, 3))},
        ]
    return rng.choice(makers)()


def nested(rng: random.Random) -> Any:
    value: Any = rng.choice((1, "x", None))
    for _ in range(rng.choice((3, 60, 64, 70, 300))):
        value = [value] if rng.random() < 0.5 else {"kind": value}
    return value


def ids(rng: random.Random, most: int = 12) -> list[int]:
    return [rng.randint(-1 if rng.random() < 0.1 else 0, 40) for _ in range(rng.randint(0, most))]


def part(rng: random.Random) -> dict[str, Any]:
    """Return a decoder, a cache or an iteration, with parameters that may be another's."""
    made: dict[str, Any] = {"kind": rng.choice(KINDS)}
    for name in rng.sample(PARAMETERS, rng.randint(0, 3)):
        made[name] = rng.choice((0, 1, 2, 0.5, 0.95, 1.0, 10**6, 2**31 - 1, -1, "x", True))
    return made


def diffusion(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if rng.random() < 0.5:
        made["block_length"] = rng.choice((1, 3, 8, 16, 32, 64, 10**6, 2**31 - 1, 0, "8"))
    if rng.random() < 0.3:
        made["cfg_scale"] = rng.choice((0, -0.0, 0.5, 3, 1e9, -1))
    for name in ("decoder", "cache", "iteration"):
        if rng.random() < 0.4:
            made[name] = part(rng)
    if rng.random() < 0.2:
        made["speculation"] = {"kind": "verify", "drafts": rng.choice((1, 4, 16, 0, 17, "x"))}
    return made


def messages(rng: random.Random) -> list[Any]:
    made: list[Any] = []
    for _ in range(rng.randint(0, 3)):
        message: dict[str, Any] = {"role": rng.choice(("user", "user", "assistant", "king", 1))}
        message["content"] = text(rng) if rng.random() < 0.8 else anything(rng)
        if rng.random() < 0.1:
            message[text(rng)] = anything(rng)
        made.append(message)
    return made


def prompt(rng: random.Random) -> Any:
    return rng.choice(
        (
            lambda: text(rng),
            lambda: [text(rng) for _ in range(rng.randint(0, 3))],
            lambda: ids(rng),
            lambda: [ids(rng) for _ in range(rng.randint(0, 3))],
            lambda: [text(rng), ids(rng)],
        )
    )()


# Values that are often right, so that some bodies get through to the engine.
LIKELY: dict[str, Callable[[random.Random], Any]] = {
    "messages": messages,
    "prompt": prompt,
    "input": lambda rng: text(rng) if rng.random() < 0.5 else messages(rng),
    "system": text,
    "instructions": text,
    "tokens": ids,
    "max_tokens": lambda rng: rng.randint(1, 12),
    "max_output_tokens": lambda rng: rng.randint(1, 12),
    "max_completion_tokens": lambda rng: rng.randint(1, 12),
    "min_tokens": lambda rng: rng.randint(0, 12),
    "n": lambda rng: rng.randint(1, 3),
    "temperature": lambda rng: rng.choice((0, -0.0, 0.7, 1, 100)),
    "top_p": lambda rng: rng.choice((1, 0.9, 1e-9, -0.0)),
    "min_p": lambda rng: rng.choice((0, 0.1, 1, 1e-320, -0.0)),
    "presence_penalty": lambda rng: rng.choice((0, 2, -2, 1e-320, -0.0)),
    "frequency_penalty": lambda rng: rng.choice((0, 2, -2, 0.5, -0.0)),
    "repetition_penalty": lambda rng: rng.choice((1, 0.01, 100, 1.1, 0)),
    "no_repeat_ngram_size": lambda rng: rng.choice((0, 1, 2, 10**9)),
    "top_k": lambda rng: rng.choice((-1, 0, 1, 5, 10**6)),
    "seed": lambda rng: rng.choice((0, 1, -1, 2**63 - 1, -(2**63))),
    "priority": lambda rng: rng.choice((0, 1, -1, 2**31 - 1, -(2**31))),
    "stop": lambda rng: rng.choice((text(rng), [text(rng), "e"], ["e"])),
    "stop_sequences": lambda rng: [text(rng), "e"],
    "stop_token_ids": ids,
    "allowed_token_ids": ids,
    "logit_bias": lambda rng: {str(i): rng.choice((1, -1.5, 100, -100, -0.0)) for i in ids(rng, 4)},
    "bad_words": lambda rng: [rng.choice(("e", "x", " ", text(rng))) for _ in range(2)],
    "stream_options": lambda rng: {
        name: rng.random() < 0.5
        for name in ("include_usage", "continuous_usage_stats", "include_canvas")
    },
    "logprobs": lambda rng: rng.choice((True, False, 0, 3, 21)),
    "top_logprobs": lambda rng: rng.randint(0, 21),
    "diffusion": diffusion,
    "suffix": text,
    "model": lambda rng: None,
    "chat_template_kwargs": lambda rng: {rng.choice(WORDS): anything(rng)},
}


def value_of(name: str, rng: random.Random) -> Any:
    """Return a value for a field: right more often than not."""
    dice = rng.random()
    if dice < 0.65:
        return LIKELY[name](rng) if name in LIKELY else rng.random() < 0.5
    if dice < 0.97:
        return anything(rng)
    return nested(rng)
