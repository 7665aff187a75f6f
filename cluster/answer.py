"""One answer to one prompt, as the command line prints it: streamed, measured or watched."""

import sys
import time

from rich.console import Console

from diffray.cluster.measured import Measured
from diffray.cluster.watch import animate
from diffray.components.params import SamplingParams
from diffray.workers.llm import DiffusionLLM
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
    measure: bool,
) -> Measured | None:
    """Print the answer: animated if a terminal can show it, whole if measured, else streamed."""
    if watch and sys.stdout.isatty():
        return animate(llm, prompt, params, Console())
    if measure:
        return _print_measured(llm, prompt, params)
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return None


def _print_measured(llm: DiffusionLLM, prompt: str | Messages, params: SamplingParams) -> Measured:
    began = time.perf_counter()
    if isinstance(prompt, str):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    else:
        (output,) = llm.chat(prompt, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    sys.stdout.write(output.outputs[0].text + "\n")
    return Measured(output.completion_tokens, output.forwards, seconds)
