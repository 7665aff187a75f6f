"""Compare this engine with Fast-dLLM's own code: same weights, prompts and threads, on CPU.

    git clone https://github.com/NVlabs/Fast-dLLM
    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.compare_fast_dllm --fast-dllm Fast-dLLM tests/golden/llada /tmp/llada-100m

Both decode with threshold 0.9, the dual cache and blocks of 32. First Fast-dLLM must reproduce its
golden cases, which shows that it is run as it should be. Then the systems take turns; a ratio is
the median over turns of one turn's two times, so that a busy machine slows both. All tokens count,
and the prompt's forward is included. The environment's TORCHDYNAMO_DISABLE=1 leaves out the
torch.compile around Fast-dLLM's attention, which slowed it on the golden checkpoint.
"""

import argparse
import importlib
import json
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.golden import GOLDEN, cases_of
from diffray import DiffusionLLM, SamplingParams

THRESHOLD, BLOCK_LENGTH = 0.9, 32


class Answer(NamedTuple):
    """Each row's tokens, and how many forwards each row took part in."""

    tokens: list[list[int]]
    forwards: list[int]


class FastDLLM:
    """Fast-dLLM's generate functions on one checkpoint, from a checkout of its repository."""

    def __init__(self, checkout: Path, checkpoint: Path) -> None:
        source = next(
            (f for f in (checkout / "v1" / "llada", checkout / "llada") if f.is_dir()), None
        )
        if source is None:
            raise ValueError(f"{checkout} has neither v1/llada nor llada: not Fast-dLLM's checkout")
        # Early versions import einops, and use it nowhere that is reached.
        sys.modules.setdefault("einops", types.SimpleNamespace(rearrange=None))  # type: ignore[arg-type]
        sys.path.insert(0, str(source))
        self.functions: Any = importlib.import_module("generate")
        config_class: Any = importlib.import_module("model.configuration_llada").LLaDAConfig
        model_class: Any = importlib.import_module("model.modeling_llada").LLaDAModelLM
        sys.path.remove(str(source))
        # transformers 5 no longer keeps these on every configuration.
        config_class.use_cache, config_class.use_return_dict = False, True
        config = json.loads((checkpoint / "config.json").read_text())
        self.mask_id = int(config["mask_token_id"])
        self.model = model_class(config_class(**config)).eval()
        weights = {n: w.float() for n, w in load_file(checkpoint / "model.safetensors").items()}
        self.model.load_state_dict(weights)

    def run(
        self,
        prompts: list[list[int]],
        gen_length: int,
        block_length: int = BLOCK_LENGTH,
        *,
        cache: str = "dual",
        steps: int | None = None,
        **rule: float,
    ) -> Answer:
        """Run one batch; `rule` is its threshold or factor, none the fixed schedule."""
        name = {"none": "generate", "prefix": "generate_with_prefix_cache"}.get(
            cache, "generate_with_dual_cache"
        )
        canvas, forwards = getattr(self.functions, name)(
            self.model,
            torch.tensor(prompts),
            steps=steps or gen_length,
            gen_length=gen_length,
            block_length=block_length,
            mask_id=self.mask_id,
            **rule,
        )
        return Answer(canvas[:, len(prompts[0]) :].tolist(), [forwards] * len(prompts))

    def run_one_by_one(self, prompts: list[list[int]], gen_length: int) -> Answer:
        rows = [self.run([prompt], gen_length, threshold=THRESHOLD) for prompt in prompts]
        return Answer([r.tokens[0] for r in rows], [r.forwards[0] for r in rows])

    def run_batched(self, prompts: list[list[int]], gen_length: int) -> Answer:
        return self.run(prompts, gen_length, threshold=THRESHOLD)

    def best_runner(
        self, prompts: list[list[int]], gen_length: int
    ) -> Callable[[list[list[int]], int], Answer]:
        """Return its own batched call where that gives every row what the row gets alone."""
        if len(prompts) == 1:
            return self.run_batched
        try:
            batched = self.run_batched(prompts, gen_length).tokens
        except (RuntimeError, IndexError) as error:
            print(f"Fast-dLLM cannot run this batch ({error}): one by one", file=sys.stderr)
            return self.run_one_by_one
        if batched != self.run_one_by_one(prompts, gen_length).tokens:
            print("Fast-dLLM's rows differ from the same rows alone", file=sys.stderr)
        return self.run_batched


def check_golden(checkout: Path) -> str:
    """Reproduce the golden cases that come from Fast-dLLM; returns how many agree."""
    system = FastDLLM(checkout, GOLDEN / "llada")
    cases = [case for case in cases_of("llada") if case["source"] == "fast-dllm"]
    equal = fewer = 0
    for case in cases:
        given = {name: case[name] for name in ("steps", "threshold") if name in case}
        found = system.run(
            [case["prompt"]],
            case["gen_length"],
            case["block_length"],
            cache=case["cache"],
            **given,
        )
        equal += found.tokens[0] == case["tokens"]
        fewer += found.forwards[0] < case["forwards"]
    return f"Fast-dLLM reproduces {equal} of its {len(cases)} golden cases ({fewer} sooner)"


def ours(llm: DiffusionLLM, prompts: list[list[int]], gen_length: int) -> Answer:
    diffusion = {
        "block_length": BLOCK_LENGTH,
        "iteration": {"kind": "blockwise"},
        "decoder": {"kind": "threshold", "threshold": THRESHOLD},
        "cache": {"kind": "dual"},
    }
    params = SamplingParams(max_tokens=gen_length, ignore_eos=True, diffusion=diffusion)
    found = llm.generate(prompts, params, use_tqdm=False)
    return Answer([row.outputs[0].token_ids for row in found], [row.forwards for row in found])


def compare(checkout: Path, checkpoint: Path, batches: list[int], args: argparse.Namespace) -> None:
    """Print one row of the table for each batch size."""
    theirs = FastDLLM(checkout, checkpoint)
    generator = torch.Generator().manual_seed(args.seed)
    shape = (max(batches), args.prompt_length)
    # The last two ids are the mask and the end of text.
    ids = torch.randint(0, theirs.mask_id, shape, generator=generator).tolist()
    length = args.gen_length
    clock = time.process_time if args.cpu_time else time.perf_counter
    with DiffusionLLM(str(checkpoint), dtype="float32", max_num_seqs=max(batches)) as llm:
        for batch in batches:
            prompts = ids[:batch]
            runner = theirs.best_runner(prompts, length)
            systems = [partial(ours, llm, prompts, length), partial(runner, prompts, length)]
            answers = [call() for call in systems]  # warm
            times: list[list[float]] = [[], []]
            for turn in range(args.repeats):
                for which in (0, 1) if turn % 2 else (1, 0):
                    start = clock()
                    systems[which]()
                    times[which].append(clock() - start)
            print_row(checkpoint, runner == theirs.run_one_by_one, answers, times)


def print_row(
    checkpoint: Path, one_by_one: bool, answers: list[Answer], times: list[list[float]]
) -> None:
    mine, their = answers
    tokens = sum(map(len, mine.tokens))
    pairs = zip(mine.tokens, their.tokens, strict=True)
    same = sum(a == b for row, other in pairs for a, b in zip(row, other, strict=True))
    ratios = sorted(b / a for a, b in zip(*times, strict=True))
    cells = [checkpoint.name, f"{len(mine.tokens)}{' (one by one)' if one_by_one else ''}"]
    for answer, seconds in zip(answers, times, strict=True):
        forwards = sum(answer.forwards) / len(answer.forwards)
        cells += [
            f"{tokens / median(seconds):.1f}",
            f"{forwards:.1f}",
            f"{tokens / len(answer.tokens) / forwards:.2f}",
        ]
    cells += [f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", f"{same}/{tokens}"]
    print(f"| {' | '.join(cells)} |", flush=True)


HEADER = """\
| checkpoint | batch | diffray tok/s | forwards a row | tokens a forward | Fast-dLLM tok/s \
| forwards a row | tokens a forward | speed ratio | equal tokens |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", type=Path, nargs="*", default=[GOLDEN / "llada"])
    parser.add_argument("--fast-dllm", type=Path, required=True, help="a checkout of Fast-dLLM")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1  # idle threads spin, and their time would count
    torch.set_num_threads(args.threads)
    print(check_golden(args.fast_dllm))
    seconds = "processor" if args.cpu_time else "wall clock"
    print(
        f"{args.threads} threads, {seconds} seconds, prompts of {args.prompt_length}, "
        f"{args.gen_length} new tokens"
    )
    print(HEADER)
    for checkpoint in args.checkpoints:
        compare(args.fast_dllm, checkpoint, args.batches, args)


if __name__ == "__main__":
    main()
