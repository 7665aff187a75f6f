"""One answer to one prompt, as the command line prints it: streamed or watched."""

import sys
import time

from rich.console import Console

from diffray.cluster.cli.measured import Measured
from diffray.cluster.cli.watch import animate
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.workers.text import Messages


def as_prompt(llm: DiffusionLLM, text: str, *, raw: bool) -> str | Messages:
    """Return a chat message where the model has a chat template, else the text itself."""
    if llm.tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer.json, so it cannot read text; "
            "in Python, DiffusionLLM takes token ids"
        )
    if raw or not llm.tokenizer.fast.chat_template:
        return text
    return [{"role": "user", "content": text}]


def print_answer(
    llm: DiffusionLLM,
    prompt: str | Messages,
    params: SamplingParams,
    *,
    watch: bool,
) -> Measured:
    """Print the answer: animated if a terminal can show it, else as it becomes final."""
    if watch and sys.stdout.isatty():
        return animate(llm, prompt, params, Console())
    began = time.perf_counter()
    tokens = forwards = 0
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        tokens, forwards = tokens + len(delta.token_ids), delta.forwards
    sys.stdout.write("\n")
    return Measured(tokens, forwards, time.perf_counter() - began)
