"""Compares the engine with diffusers' LLaDA2 pipeline: same weights, threshold, prompts, in turns.

Both write the same number of tokens for a prompt, so many that its canvas ends with a block, and
stop at no end token. The pipeline has no cache and recomputes everything up to the block's end in
each step; it takes one prompt at a time here, for it pads others on the left, where LLaDA2's
blocks would move. The engine does so too, and then takes them all at once.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import paired
from benchmarks.peers.environments import Environment
from benchmarks.peers.servers import process_variables
from diffray import DiffusionLLM, SamplingParams

BLOCK_LENGTH, THRESHOLD = 32, 0.95
HEAD = paired.head("system", "tokens/s", "diffray / it", "forwards", "equal tokens")


class Pipeline:
    """diffusers in its own process, asked line by line."""

    def __init__(self, process: "subprocess.Popen[str]", mask_id: int) -> None:
        self._process, self._mask_id = process, mask_id

    def run(
        self, prompts: list[list[int]], lengths: list[int], *, block_causal: bool
    ) -> paired.Turn:
        asked = {
            "prompts": prompts,
            "gen_lengths": lengths,
            "block_length": BLOCK_LENGTH,
            "threshold": THRESHOLD,
            "mask_id": self._mask_id,
            "block_causal": block_causal,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("diffusers' pipeline has ended; what it said stands above")
        answer = json.loads(line)
        return paired.Turn(answer["seconds"], answer["tokens"], answer["forwards"])


@contextmanager
def pipeline(
    environment: Environment, folder: Path, threads: int, mask_id: int
) -> Iterator[Pipeline]:
    script = Path(__file__).with_name("run_diffusers.py")
    process = subprocess.Popen(
        [str(environment.python), str(script), str(folder), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | process_variables(threads),
    )
    try:
        yield Pipeline(process, mask_id)
    finally:
        process.kill()
        process.wait()


def encode(llm: DiffusionLLM, question: str) -> list[int]:
    if llm.tokenizer is None:
        raise ValueError("--llada2: the checkpoint has no tokenizer.json to read questions with")
    return llm.tokenizer.encode_chat([{"role": "user", "content": question}])


def gen_length(prompt: list[int], wanted: int) -> int:
    """Return at least so many tokens that prompt and answer fill whole blocks."""
    return wanted + -(len(prompt) + wanted) % BLOCK_LENGTH


def ours(
    llm: DiffusionLLM, prompts: list[list[int]], lengths: list[int], *, at_once: bool
) -> paired.Turn:
    diffusion: dict[str, Any] = {
        "block_length": BLOCK_LENGTH,
        "decoder": {"kind": "threshold", "threshold": THRESHOLD},
    }
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, diffusion=diffusion)
        for length in lengths
    ]
    groups = [prompts] if at_once else [[prompt] for prompt in prompts]
    wishes = [params] if at_once else [[each] for each in params]
    begin = time.perf_counter()
    found = [
        output
        for group, wish in zip(groups, wishes, strict=True)
        for output in llm.generate(list(group), wish, use_tqdm=False)
    ]
    seconds = time.perf_counter() - begin
    tokens = [output.outputs[0].token_ids for output in found]
    return paired.Turn(seconds, tokens, sum(output.forwards for output in found))


def compare(
    llm: DiffusionLLM, peer: Pipeline, prompts: list[list[int]], *, wanted: int, turns: int
) -> list[str]:
    """Return the table's rows."""
    lengths = [gen_length(prompt, wanted) for prompt in prompts]
    turns_of = paired.take_turns(
        {
            "diffray, one by one": lambda _: ours(llm, prompts, lengths, at_once=False),
            "diffray, all at once": lambda _: ours(llm, prompts, lengths, at_once=True),
            "diffusers, given LLaDA2's mask": lambda _: peer.run(
                prompts, lengths, block_causal=True
            ),
            "diffusers, as it is": lambda _: peer.run(prompts, lengths, block_causal=False),
        },
        turns,
        tell=lambda turn: f"{turn.rate:.1f} tokens/s",
    )
    first = turns_of["diffray, one by one"]
    return [
        paired.row(
            name,
            paired.rate(found),
            "1" if found is first else paired.ratio(paired.rates(first), paired.rates(found)),
            int(found[-1].work),
            paired.equal_tokens(first[-1], found[-1]),
        )
        for name, found in turns_of.items()
    ]
