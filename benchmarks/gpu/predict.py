"""Predict the time of a step, and the tokens per second, before and after each change.

    python -m benchmarks.gpu.predict
    python -m benchmarks.gpu.predict --shape llada2-mini --rows 8 --weights float8
    python -m benchmarks.gpu.predict --markdown

Prints a step's kernels, what each change saves, and all models and sizes, for an H200. `costs.py`
has the arithmetic; `step_time` and `generate` report predictions beside what they measure. Needs
neither a GPU nor torch.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.costs import Step
from benchmarks.gpu.shapes import SHAPES, Shape, Work

ROOT: Final = Path(__file__).parents[2]
MOE: Final = "llada-moe-7b-a1b"
BATCH: Final = 32

Table = list[tuple[str, ...]]


class Change(NamedTuple):
    """A change to the code that was predicted before it was built."""

    sign: str  # file: text; the change is built if the file contains the text
    reason: str  # why it saves time
    # The variants that make it: two regular expressions, "kernel: name"; empty: all of them do.
    variants: str = ""

    @property
    def built(self) -> bool:
        file, text = self.sign.split(": ", 1)
        path = ROOT / file
        return path.exists() and text in path.read_text()

    def made_by(self, ran: Mapping[str, str]) -> bool:
        """Return whether at least half of the kernel's shapes ran in such a variant."""
        if not self.variants:
            return True
        kernel, variant = self.variants.split(": ")
        own = [name for place, name in ran.items() if re.fullmatch(kernel, place.split("/")[0])]
        return 0 < len(own) <= 2 * sum(bool(re.fullmatch(variant, name)) for name in own)


CHANGES: Final = {
    "64 rows": Change(
        "kernels/triton/experts.py: min(max(tokens, 16), 64)",
        "of 64 tokens no expert gets more, so none reads its weights twice: nothing where tokens "
        "spread, 0.8 ms with a quarter of the experts hot",
        r"\w*experts_\w+: .* 64x\d+x\d+ .*",
    ),
    "router kernels": Change(
        "kernels/triton/router.py: fused: bool",
        "two of 3 and 6 us, the product split over blocks and the choice with the pair lists, for "
        "cast, float32 product (10 us: one column after the other), choice and lists, now 21",
        r"\w+_router: .*fused.*",
    ),
    "larger pair chunks": Change(
        "kernels/triton/pairs.py: _MOST_AT_ONCE",
        "4096 pairs at once: of 2048 tokens 8 chunks one after the other, not 32",
    ),
    "dependent launch": Change(
        "kernels/triton/launch.py: launch_pdl",
        "own kernels start while the one before ends: a gap of 0.2 us instead of 1.3, and 0.7 less "
        "where weights are loaded meanwhile",
        r"\w+: .* pdl\b.*",
    ),
    "sum and norm": Change(
        "kernels/triton/pair_sums.py: sum_add_norm",
        "the sum over a token's experts is made by the norm behind it: a kernel less a layer",
        r"experts_add_norm: .*fused.*",
    ),
    "shorter splits": Change(
        "kernels/triton/attention.py: split_keys in (128, 64)",
        "128 keys a split: 2 tiles one after the other instead of 4, on twice the blocks",
        r"\w*attend: .* keys .*",
    ),
    "float16 activations": Change(
        "kernels/triton/experts.py: half: bool",
        "float8 to float16 is one instruction: 414 for 16 KB of weights, 648 to bfloat16 (sm_90)",
        r"\w*experts_\w+|quantized_linear: .*half.*",
    ),
    "large tiles": Change(
        "kernels/triton/experts.py: (128, 64, 8, 3)",
        "from 48 rows an expert cuBLAS's rate, less what its last tile of 128 rows leaves empty; "
        "64 columns read 64 operations a byte from the L2 cache, 350 Tflop/s at most",
        r"\w*experts_\w+: .* 128x128x64 .*",
    ),
    "head by cuBLAS": Change(
        "kernels/triton/confidence.py: linear(",
        "from 256 rows 600 Tflop/s instead of 350, and a pass over the stored logits",
        r"confidence: .*after product.*",
    ),
    "persistent blocks": Change(
        "kernels/triton/expert_products.py: num_programs",
        "up to 512 tokens: blocks that stay and fetch the next tile's first weights, 95 % of the "
        "bandwidth, not 91",
        r"\w*experts_\w+: .*stay.*",
    ),
    "experts in the cache": Change(
        "kernels/triton/expert_products.py: _AHEAD",
        "norm and router leave the memory idle for 7 us a layer; blocks that stay fetch up to 30 "
        "MB of their first weights to the L2 cache meanwhile",
        r"\w*experts_\w+: .*stay.*",
    ),
    "own output product": Change(
        "kernels/triton/small_product.py: split_product",
        "up to 64 tokens: it starts early, and the norm adds up what splits of the columns gave, "
        "for which cuBLAS needs a second kernel",
        r"linear_add_norm: .*fused.*",
    ),
    "wide head tiles": Change(
        "kernels/triton/confidence.py: (256, 64, 8, 3)",
        "up to 64 rows: each tile reads all rows through the L2 cache, so half as many tiles do so "
        "half as often",
        r"confidence: .* \d+x256x64 .*",
    ),
    "wide byte tiles": Change(
        "kernels/triton/byte_product.py: (128, 128, 8, 3)",
        "dense layers in a byte, up to 64 rows: each tile reads all rows through the L2 cache, so "
        "half as many tiles do so half as often",
        r"quantized_linear: .* \d+x128x128 .*",
    ),
    "float8 products": Change(
        "kernels/triton/float8_experts.py: scaled_grouped_mm",
        "where activations are float8 rows too, in dense layers and from 48 rows an expert: 1100 "
        "Tflop/s, less experts' gate and up stored and rounded apart",
        r"float8_experts_forward|quantized_linear: scaled_(grouped_)?mm.*",
    ),
    "one kernel to settle": Change(
        "workers/batch_state.py: kernels.settle",
        "acceptance, state and canvases by one of 5 launches instead of 51: 0.09 ms a round",
        r"settle: triton.*",
    ),
    "credit's kernels": Change(
        "workers/batch_plan.py: kernels.reward",
        "what credit remembers and adds by two launches instead of 74, 0.17 ms a round",
        r"reward: triton.*",
    ),
    "bucket with neighbours": Change(
        "workers/graphs.py: block_length + neighbours",
        "recordings of 96 positions for vicinity, which filled 128",
    ),
    "graphs over ranks": Change(
        'workers/setup.py: mesh.smallest("loaded"',
        "the device's time instead of the host's, 15 to 22 us a launch; where bring-up finds "
        "replays right and faster on every rank",
    ),
    "one-shot all-reduce": Change(
        "components/mesh.py: one_shot_all_reduce_copy",
        "16.7 us for 256 KB over 8 GPUs (SGLang) instead of NCCL's 27, 33 times a step; where "
        "bring-up finds it right and faster on every rank",
    ),
    "packed gather": Change(
        "components/mesh.py: all_gather_into_tensor",
        "one collective without copies instead of five gathers into lists and a sum",
    ),
}
BUILT: Final = frozenset(name for name, change in CHANGES.items() if change.built)
STAGES: Final = {"no change": frozenset[str](), "built": BUILT, "all": frozenset(CHANGES)}
WEIGHTS: Final = ("bfloat16", "float8", "float8_rows", "int8")
# A round's time without its forward: the host's, fixed and per row, and the decoder's launches.
HOST_MS, HOST_ROW_MS = 0.22, 0.0175
DECODER_MS: Final = {"fixed": 0.12, "credit": 0.3}
SETTLED_MS, REWARDED_MS = 0.09, 0.17  # what diffray's own kernels save of that
NEIGHBOURS, WARM_UP = 32, 4  # of vicinity: positions beside a block, extra steps over everything


def made_by(ran: Mapping[str, str]) -> frozenset[str]:
    """Return the built changes that the variants made which ran, as `noted_variants` records."""
    return frozenset(name for name in BUILT if CHANGES[name].made_by(ran))


class Parts(NamedTuple):
    """The time that texts take, in ms."""

    everything: float  # steps that run all positions
    blocks: float  # the others
    between: float  # the host and the decoder, between forwards


class Generation(NamedTuple):
    """Texts written at once, as `generate` times them."""

    rows: int = 1
    rate: float = 3.87  # tokens accepted in a step
    cache: str = "dual"
    decoder: str = "fixed"
    weights: str = "bfloat16"
    prompt: int = 128
    tokens: int = 1024
    block: int = 64

    def tokens_per_s(self, shape: Shape, changes: frozenset[str]) -> float:
        """Predict the tokens per second of all rows together."""
        return self.rows * self.tokens / sum(self.parts_ms(shape, changes)) * 1e3

    def parts_ms(self, shape: Shape, changes: frozenset[str]) -> Parts:
        """Predict the time of all steps, and the time between them."""
        steps, length = round(self.tokens / self.rate), self.prompt + self.tokens
        near, long, longer = self.block, length, self.over_everything
        if self.cache == "vicinity":
            near = 2 * self.block
            if "bucket with neighbours" in changes:
                near = self.block + NEIGHBOURS
        elif self.cache == "exact":  # a block's first step stores the block before it
            long = 2 * self.block
        read = round(sum(self._rows_read(steps)))

        def ms(window: int) -> float:
            step = Step(shape, Work(self.rows, window, length), self.weights, 1, changes, read)
            return step.device_ms

        decoder = DECODER_MS[self.decoder]
        decoder -= SETTLED_MS * ("one kernel to settle" in changes)
        decoder -= REWARDED_MS * ("credit's kernels" in changes and self.decoder == "credit")
        between = HOST_MS + HOST_ROW_MS * self.rows + decoder
        return Parts(longer * ms(long), (steps - longer) * ms(near), steps * between)

    @property
    def over_everything(self) -> int:
        """The number of steps that run everything: each block's first, and warm-up steps."""
        blocks = -(-self.tokens // self.block)
        return blocks + (WARM_UP if self.cache == "vicinity" else 0)

    def _rows_read(self, steps: int) -> Iterator[float]:
        """Yield each step's part of the head's mean rows, halved as long as they hold all masks."""
        of_block = max(steps * self.block // self.tokens, 1)
        for step in range(of_block):
            rows = self.rows * self.block
            masked = rows * (1 - step / of_block)
            while rows > 32 and rows / 2 >= masked:
                rows //= 2
            yield rows / of_block


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the time of a step on an H200.")
    parser.add_argument("--shape", choices=SHAPES, default=MOE)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--weights", choices=WEIGHTS, default="bfloat16")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="as docs/gpu.md shows it")
    args = parser.parse_args()
    print(tables(args.shape, args.rows, args.weights, args.ranks, markdown=args.markdown))


def tables(name: str, batch: int, weights: str, ranks: int, *, markdown: bool) -> str:
    """Return all predictions as text; Markdown has a column for measurements."""
    how = SHAPES[name], Work(batch, SHAPES[name].block or 64, 1024), weights, ranks
    parts = []
    for title, table in (
        (f"A step of {name}, batch {batch}, {weights}, GPUs: {ranks}", kernels(*how)),
        ("Its ms as one change after the other is made", changes(*how)),
        ("Steps in ms", sizes()),
        ("Tokens per second of 1024 tokens, 3.87 accepted in a step", texts()),
        ("Their ms in bfloat16 by part; the ratio is of speeds, batch 32 to batch 1", text_parts()),
    ):
        if markdown:
            beside = [] if "because" in table[0] else ["unmeasured"] * len(table)
            rows = [[*row, *beside[:1]] for row in table]
            rows[0] = [*table[0], *["measured"] * bool(beside)]
            rows.insert(1, ["---"] * len(rows[0]))
            lines = [f"| {' | '.join(row)} |" for row in rows]
        else:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        parts.append(f"{title}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def kernels(shape: Shape, work: Work, weights: str, ranks: int) -> Table:
    """Return the kernels of a step with the changes that are built."""
    step = Step(shape, work, weights, ranks, BUILT)
    table: Table = [("kernel", "calls", "floor us", "us", "ms a step")]
    for k in step.kernels:
        us = f"{k.floor_us():.1f}", f"{k.us:.1f}"
        table.append((k.name, str(k.calls), *us, f"{k.calls * k.us / 1e3:.2f}"))
    launches = str(sum(kernel.calls for kernel in step.kernels))
    return [*table, ("all", launches, f"{step.floor_ms() * 1e3:.0f}", "", f"{step.ms:.2f}")]


def changes(shape: Shape, work: Work, weights: str, ranks: int) -> Table:
    """Return the step's time as one change after the other is made."""
    table: Table = [("change", "built", "after it", "saves", "because")]
    made, before = frozenset[str](), Step(shape, work, weights, ranks).ms
    for name, change in CHANGES.items():
        made |= {name}
        after = Step(shape, work, weights, ranks, made).ms
        is_built = "built" if name in BUILT else "not built"
        table.append((name, is_built, f"{after:.2f}", f"{before - after:.2f}", change.reason))
        before = after
    return table


def sizes() -> Table:
    """Return the steps of all models and sizes, in every kind of weights."""
    table: Table = [("model", "GPUs", "batch", "weights", "floor", *STAGES)]
    for (name, shape), ranks, rows in product(SHAPES.items(), (1, 8), (1, 8, 32)):
        work = Work(rows, shape.block or 64, 1024)
        for weights in WEIGHTS:
            steps = [Step(shape, work, weights, ranks, made) for made in STAGES.values()]
            ms = (f"{ms:.2f}" for ms in (steps[0].floor_ms(), *(step.ms for step in steps)))
            table.append((name, str(ranks), str(rows), weights, *ms))
    return table


def texts() -> Table:
    """Return the tokens per second of LLaDA-MoE."""
    table: Table = [("batch", "cache", "weights", *STAGES)]
    for rows, cache, weights in product((1, 32), ("dual", "vicinity"), WEIGHTS[:3]):
        text = Generation(rows, cache=cache, weights=weights)
        speeds = (text.tokens_per_s(SHAPES[MOE], made) for made in STAGES.values())
        table.append((str(rows), cache, weights, *(f"{speed:.0f}" for speed in speeds)))
    return table


def text_parts() -> Table:
    """Return what the texts' steps take, and how much faster each part is in a batch."""
    table: Table = [("batch", "cache", "over everything", "in blocks", "between", "all")]
    for cache in ("dual", "vicinity"):
        one, many = (
            Generation(rows, cache=cache).parts_ms(SHAPES[MOE], BUILT) for rows in (1, BATCH)
        )
        for rows, found in ((1, one), (BATCH, many)):
            table.append((str(rows), cache, *(f"{ms:.0f}" for ms in (*found, sum(found)))))
        pairs = zip((*one, sum(one)), (*many, sum(many)), strict=True)
        table.append(("ratio", cache, *(f"{BATCH * ours / theirs:.1f}" for ours, theirs in pairs)))
    return table


if __name__ == "__main__":
    main()
