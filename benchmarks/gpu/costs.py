"""A cost model of a step: the kernels that it launches, and how long each takes on an H200.

A kernel takes the gap before it, its first and last trip to memory, and the longest of: its bytes
at the bandwidth, its bytes through the L2 cache, its operations at the rate of its product, and its
chain of dependent loads. Tokens meet experts as if at random. `predict.py` explains the names of
changes. Imports no torch, so that it runs anywhere.
"""

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from benchmarks.gpu.shapes import Shape, Sparse, Work, more_tiles, rounded_up

BANDWIDTH: Final = 4.3e12  # bytes/s of a copy; 4.8 on paper
L2_BANDWIDTH: Final = 5.5e12  # bytes/s into all multiprocessors
MULTIPROCESSORS: Final = 132
GAP_US: Final = 1.3  # between kernels, also in a graph (HazyResearch, on an H100)
RAMP_US: Final = 1.4  # the first load and the last store
PDL_GAP_US, PDL_WEIGHTS_US = 0.2, 0.7  # with dependent launch: the gap; what early weights save
CUBLAS: Final = 600e12  # bfloat16 operations/s of a product; 989 on paper
SGEMM: Final = 40e12  # float32 operations/s; 67 on paper
FLOAT8: Final = 1100e12  # float8 operations/s; 1979 on paper
ATTENTION: Final = 350e12  # bfloat16 operations/s with 64 queries at a time
# Shares of the bandwidth. For experts, compiled for sm_90 with two blocks a multiprocessor,
# bfloat16 issues in 11 % of all cycles, int8 in 67 %, float8 in 73 %, and waits for conversions to
# bfloat16 on a slow unit. Conversion to float16 is one instruction: 47 % of the cycles issue.
CUBLAS_SHARE, HEAD_SHARE, ATTENTION_SHARE = 0.85, 0.88, 0.8
EXPERT_SHARE: Final = {"bfloat16": 0.91, "int8": 0.85, "float8": 0.765, "float16": 0.88}
PERSISTENT_GAIN: Final = 0.04  # added to it: no partial last wave, no wait for a first tile
L2_AHEAD, AHEAD_US = 30e6, 1.5  # bytes of experts fetched early; time until programs start to
# Chains of dependent loads, in microseconds.
KEY_TILE_US: Final = 1.33  # 64 keys: page table, keys, product, maximum, values
ROUTER_PRODUCT_US: Final = 7.3  # all columns one after the other, in a few blocks
TOPK_US: Final = 1.3  # one maximum after the other
BYTE_PROGRAMS: Final = 128  # that split a product of few columns
ROUTER_SPLITS, DONE_US = 32, 1.0  # of diffray's router; the last block's wait for the others
PAIRS_US: Final = 0.7  # 1024 pairs are read and counted
ROWS_STORED: Final = 512  # rows of logits that are stored at a time
# All-reduces over 8 GPUs: the least time, and the bytes/s of each GPU.
NCCL_US, ONE_SHOT_US, NVLINK = 25.0, 10.7, 300e9  # SGLang: 16.7 us one-shot for 256 KB
# The host's time for a launch without a graph; Triton's was measured, without the driver's part.
HOST_US: Final = {"triton": 22.0, "torch": 7.0, "collective": 15.0}


class Kernel(NamedTuple):
    """The launches of one kernel in a step."""

    name: str
    calls: int
    us: float  # of one call, as the other fields
    bytes: float
    flops: float  # in bfloat16's terms: float8 operations count less, because a GPU is faster
    host_us: float

    def floor_us(self, bandwidth: float = BANDWIDTH, rate: float = CUBLAS) -> float:
        return max(self.bytes / bandwidth, self.flops / rate) * 1e6


@dataclass
class Step:
    """A step's shape, and its kernels in the order in which they are first launched."""

    shape: Shape
    work: Work
    weights: str = "bfloat16"
    ranks: int = 1
    changes: frozenset[str] = frozenset()
    read: int | None = None  # rows of the head; None: of all tokens
    hot: float = 0.0  # the share of experts that get more rows than a small tile has
    kernels: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.work.tokens
        self.idle_us = 0.0  # of the memory, since the first kernel that started early
        self.heads = self.shape.heads // self.ranks
        self.keys = max(self.shape.kv_heads // self.ranks, 1)
        self._embedding()
        sparse = self.shape.sparse
        dense = self.shape.layers if sparse is None else sparse.dense_layers
        self._attention(self.shape.layers)
        if dense:
            self._mlp(dense, self.shape.width)
            self._norm(dense)
        if sparse is not None:
            self._experts(self.shape.layers - dense, sparse)
        self._head()

    @property
    def device_ms(self) -> float:
        return sum(kernel.calls * kernel.us for kernel in self.kernels) / 1e3

    @property
    def host_ms(self) -> float:
        """The host's time without a graph."""
        return sum(kernel.calls * kernel.host_us for kernel in self.kernels) / 1e3

    def floor_ms(self, bandwidth: float = BANDWIDTH, rate: float = CUBLAS) -> float:
        """The least time for the bytes and operations of each kernel."""
        return sum(kernel.calls * kernel.floor_us(bandwidth, rate) for kernel in self.kernels) / 1e3

    @property
    def ms(self) -> float:
        """The device's time in a graph; without "graphs over ranks", several ranks have none."""
        if self.ranks == 1 or "graphs over ranks" in self.changes:
            return self.device_ms
        return max(self.device_ms, self.host_ms)

    def _add(
        self,
        name: str,
        calls: int,
        moved: float,
        *,
        share: float = 1.0,
        cached: float = 0.0,
        flops: float = 0.0,
        rate: float = CUBLAS,
        chain: float = 0.0,
        kind: str = "torch",
        weights: bool = False,
        launches: int = 1,
        fetched: float = 0.0,
        float8: bool = False,
    ) -> None:
        """Add calls of a kernel; `fetched` of its bytes are in the cache; `chain` is in us.

        `float8` operands count as such, even if they are multiplied in another type.
        """
        early = kind == "triton" and "dependent launch" in self.changes
        gap = PDL_GAP_US - PDL_WEIGHTS_US * weights if early else GAP_US * launches
        read = (moved - fetched) / (BANDWIDTH * share)
        work = max(read, cached / L2_BANDWIDTH, flops / rate) * 1e6
        us = gap + RAMP_US + max(work, chain)
        self.idle_us = self.idle_us + us - moved / BANDWIDTH * 1e6 if early else 0.0
        flops *= CUBLAS / FLOAT8 if float8 else 1.0
        self.kernels.append(Kernel(name, calls, us, moved, flops, HOST_US[kind]))

    def _product(self, name: str, calls: int, inputs: int, outputs: int, rows: int) -> None:
        """Add a product with a weight matrix, by cuBLAS."""
        moved = 2.0 * (inputs * outputs + rows * (inputs + outputs))
        flops = 2.0 * rows * inputs * outputs
        blocks = math.ceil(rows / 64) * math.ceil(outputs / 64)
        split = 2 if blocks < MULTIPROCESSORS / 2 else 1  # over columns, followed by a sum
        self._add(name, calls, moved, share=CUBLAS_SHARE, flops=flops, launches=split)

    @property
    def _in_bytes(self) -> bool:
        """Whether attention's and MLPs' matrices are in bytes: in a model without experts."""
        return self.shape.sparse is None and self.weights != "bfloat16"

    def _matrix(self, name: str, calls: int, inputs: int, outputs: int) -> None:
        """Add a product with a matrix of attention or MLP, for all tokens."""
        tokens, count = self.tokens, 1.0 * inputs * outputs
        if not self._in_bytes:
            self._product(name, calls, inputs, outputs, tokens)
            return
        flops, rounds = 2.0 * tokens * count, self.weights == "float8_rows"
        if rounds and "float8 products" in self.changes:
            self._add("_round_row", calls, 3.0 * tokens * inputs, kind="triton")
            moved = count + tokens * (inputs + 2.0 * outputs)
            self._add(
                "_scaled_mm",
                calls,
                moved,
                share=CUBLAS_SHARE,
                flops=flops,
                rate=FLOAT8,
                float8=True,
            )
            return
        if rounds:
            self._add("_round_row", calls, 4.0 * tokens * inputs, kind="triton")
        wide = tokens > 64 or "wide byte tiles" in self.changes
        blocks, lanes = math.ceil(outputs / (128 if wide else 64)), math.ceil(tokens / 128)
        splits = math.ceil(BYTE_PROGRAMS / blocks) if lanes == 1 else 1
        result = (4.0 * splits if splits > 1 else 2.0) * tokens * outputs
        self._add(
            "_byte_product",
            calls,
            count + 2.0 * tokens * inputs + result,
            share=self._share_of_bytes,
            cached=count * lanes + 2.0 * tokens * inputs * blocks,  # each block reads all rows
            flops=flops,
            kind="triton",
            weights=True,
            float8=rounds,
        )
        if splits > 1:
            self._add("_sum_parts", calls, result + 2.0 * tokens * outputs, kind="triton")

    @property
    def _share_of_bytes(self) -> float:
        """The share of the bandwidth at which weights are read if registers widen them."""
        kind = "float16" if "float16 activations" in self.changes else "float8"
        return EXPERT_SHARE[kind if self.weights.startswith("float8") else self.weights]

    def _all_reduce(self, calls: int) -> None:
        if self.ranks == 1:
            return
        size = 2.0 * self.tokens * self.shape.hidden
        us = NCCL_US + 2 * size / NVLINK * 1e6
        if "one-shot all-reduce" in self.changes:
            us = min(us, ONE_SHOT_US + (self.ranks - 1) * size / NVLINK * 1e6)
        self._add("all_reduce", calls, 0.0, chain=us - GAP_US - RAMP_US, kind="collective")

    def _embedding(self) -> None:
        row = 4.0 * self.tokens * self.shape.hidden
        self._add("embedding", 1, row)
        if self.ranks > 1:
            self._add("ids of this rank", 6, row / 3)
            self._all_reduce(1)
        self._add("index_select", 2, 8.0 * self.tokens * self.shape.rotated)
        self._add("_norm_row", 1, row, kind="triton")

    def _attention(self, calls: int) -> None:
        shape, work, size = self.shape, self.work, self.shape.head_dim
        every = self.heads + 2 * self.keys
        self._matrix("mm qkv", calls, shape.hidden, every * size)
        moved = 4.0 * self.tokens * every * size
        self._add("_rotate_heads", calls, moved, kind="triton")

        shared, window = self.heads // self.keys, min(work.window, work.context)
        tile = min(max(rounded_up(window * shared), 16), 64)
        programs = math.ceil(window * shared / tile) * self.keys * work.rows
        fewest = 128 if "shorter splits" in self.changes else 256
        splits = max(1, min(512 // programs, work.context // fewest, 32))
        tiles = math.ceil(work.context / splits / 64)
        waves = math.ceil(programs * splits / (2 * MULTIPROCESSORS))
        pool = 4.0 * work.rows * work.context * self.keys * size
        self._add(
            "_read_keys",
            calls,
            pool + 4.0 * self.tokens * self.heads * size,
            share=ATTENTION_SHARE,
            flops=4.0 * self.tokens * work.context * self.heads * size,
            rate=ATTENTION,
            chain=waves * tiles * KEY_TILE_US,
            kind="triton",
        )
        if splits > 1:
            part = self.tokens * self.heads * size
            self._add("_join_splits", calls, part * (4.0 * splits + 2), kind="triton")
        fused = self.tokens <= 64 and self.ranks == 1 and not self._in_bytes
        if fused and "own output product" in self.changes:
            self._split_product(calls, self.heads * size)
            return
        self._matrix("mm out", calls, self.heads * size, shape.hidden)
        self._all_reduce(calls)
        self._norm(calls)

    def _split_product(self, calls: int, inputs: int) -> None:
        """Add diffray's own output product, whose parts the norm adds up."""
        tokens, outputs = self.tokens, self.shape.hidden
        blocks = math.ceil(outputs / (128 if outputs >= 4096 else 64))
        parts = 4.0 * tokens * outputs * math.ceil(128 / blocks)
        weights = 2.0 * inputs * outputs
        self._add(
            "_split_product",
            calls,
            weights + 2.0 * tokens * inputs + parts,
            share=EXPERT_SHARE["bfloat16"],
            cached=weights + 2.0 * tokens * inputs * blocks,  # each block reads all rows
            flops=2.0 * tokens * inputs * outputs,
            kind="triton",
            weights=True,
        )
        self._norm(calls, parts - 2.0 * tokens * outputs)

    def _norm(self, calls: int, more: float = 0.0) -> None:
        """Add the kernel that adds the residual and normalizes, and reads `more` bytes."""
        moved = 8.0 * self.tokens * self.shape.hidden + more
        self._add("_norm_row", calls, moved, kind="triton")

    def _mlp(self, calls: int, width: int) -> None:
        width //= self.ranks
        self._matrix("mm gate_up", calls, self.shape.hidden, 2 * width)
        self._add("silu", calls, 4.0 * self.tokens * width)
        self._add("mul_", calls, 6.0 * self.tokens * width)
        self._matrix("mm down", calls, width, self.shape.hidden)
        self._all_reduce(calls)

    def _experts(self, calls: int, sparse: Sparse) -> None:
        tokens, hidden, pairs = self.tokens, self.shape.hidden, self.tokens * sparse.chosen
        table, logits = 4.0 * hidden * sparse.experts, 4.0 * tokens * sparse.experts
        flops = 2.0 * tokens * hidden * sparse.experts
        listing = 2 * math.ceil(pairs / 1024) * PAIRS_US
        if "larger pair chunks" in self.changes:  # a single chunk is read once
            listing = (2 if pairs > 4096 else 1) * math.ceil(pairs / 4096) * PAIRS_US
        choose = "_grouped_topk" if sparse.groups else "_softmax_topk"
        if "router kernels" in self.changes and tokens <= 256:
            parts = 4.0 * ROUTER_SPLITS * tokens * sparse.experts
            moved = 2.0 * tokens * hidden + table + parts
            self._add("_multiply", calls, moved, flops=3 * flops, kind="triton", weights=True)
            chain = TOPK_US + DONE_US + PAIRS_US
            self._add(choose, calls, parts, chain=chain, kind="triton")
        else:
            self._add("_to_copy", calls, 6.0 * tokens * hidden)
            chain = ROUTER_PRODUCT_US
            self._add("mm router", calls, table + logits, flops=flops, rate=SGEMM, chain=chain)
            self._add(choose, calls, logits, chain=TOPK_US, kind="triton")
            self._add("_list_pairs", calls, 12.0 * pairs, chain=listing, kind="triton")
        width = sparse.width // self.ranks
        rounds, names = self.weights == "float8_rows", ("_round_row", "_round_row")
        sizes = 4.0 * tokens * hidden, 4.0 * pairs * width
        many = rounds and pairs >= 48 * sparse.experts
        self.grouped = many and "float8 products" in self.changes  # torch's product of float8
        if self.grouped:
            names = "_gather_row", "_gate_row"
            sizes = (2.0 * tokens + pairs) * hidden, 5.0 * pairs * width
        if rounds:
            self._add(names[0], calls, sizes[0], kind="triton")
        self._expert_product("_gate_up", calls, sparse, hidden, width, 2)
        if rounds:
            self._add(names[1], calls, sizes[1], kind="triton")
        self._expert_product("_down", calls, sparse, width, hidden, 1)
        fused = "sum and norm" in self.changes and self.ranks == 1 and not rounds
        if not fused:
            self._add("_sum_pairs", calls, 2.0 * (pairs + tokens) * hidden, kind="triton")
        if sparse.shared_width:
            self._mlp(calls, sparse.shared_width)
        if fused:
            summed = pairs + (3 + bool(sparse.shared_width)) * tokens
            self._add("_sum_norm_row", calls, 2.0 * summed * hidden, kind="triton")
            return
        if sparse.shared_width:
            self._add("add", calls, 6.0 * tokens * hidden)
        else:
            self._all_reduce(calls)
        self._norm(calls)

    def _expert_product(
        self, name: str, calls: int, sparse: Sparse, inputs: int, columns: int, matrices: int
    ) -> None:
        """Add a product of every expert with its rows; gate and up are two matrices in one."""
        tokens, pairs = self.tokens, self.tokens * sparse.chosen
        chance, mean = sparse.chosen / sparse.experts, pairs / sparse.experts
        distinct = self.shape.distinct_experts(tokens)
        one = float(matrices * columns * inputs * (2 if self.weights == "bfloat16" else 1))
        rows = min(max(rounded_up(math.ceil(mean + 4 * math.sqrt(mean))), 16), 128)
        if "64 rows" in self.changes and tokens <= 64:
            rows = 64
        tiles = distinct + sparse.experts * more_tiles(tokens, chance, rows)
        # Each block of 64 columns reads its expert's rows.
        cached, rate = one * tiles + 2.0 * pairs * inputs * math.ceil(columns / 64), CUBLAS
        if self.grouped or ("large tiles" in self.changes and mean >= 48):
            tiles = distinct + sparse.experts * more_tiles(tokens, chance, 128)
            cached, rate = 0.0, (FLOAT8 if self.grouped else CUBLAS) * pairs / (tiles * 128)
        share = self._share_of_bytes
        most = 0 if self.weights == "float8_rows" else 512  # tokens
        staying = tokens <= most and "persistent blocks" in self.changes
        share += PERSISTENT_GAIN * staying
        again = self.hot * (rows < min(tokens, 64))  # weights of experts with a second tile
        moved = one * distinct * (1 + again) + 2.0 * (tokens * inputs + pairs * columns)
        if self.grouped:  # gate and up are stored apart
            moved = one * distinct + pairs * (inputs + 2.0 * matrices * columns)
        fetched = 0.0
        if name == "_gate_up" and staying and "experts in the cache" in self.changes:
            idle = max(self.idle_us - AHEAD_US, 0.0) / 1e6
            fetched = min(L2_AHEAD, idle * BANDWIDTH * share)
        self._add(
            name,
            calls,
            moved,
            share=share,
            cached=cached,
            flops=2.0 * pairs * matrices * columns * inputs,
            rate=rate,
            kind="torch" if self.grouped else "triton",
            weights=True,
            fetched=fetched,
            float8=self.weights == "float8_rows",
        )

    def _head(self) -> None:
        rows = self.tokens if self.read is None else self.read
        vocab, hidden = self.shape.vocab // self.ranks, self.shape.hidden
        table, logits = 2.0 * vocab * hidden, 2.0 * rows * vocab
        wide = 256 if "wide head tiles" in self.changes and rows <= 64 else 128
        self._add("full", 1, 8.0 * rows)
        self._add("zeros", 1, 4.0 * rows)
        if "head by cuBLAS" in self.changes and rows >= 256:
            parts = math.ceil(rows / ROWS_STORED)
            self._product("mm head", parts, hidden, vocab, rows // parts)
            self._add("_weigh_logits", parts, logits / parts, kind="triton")
        else:
            tile = min(max(rounded_up(rows), 16), 128)
            cached = table * math.ceil(rows / tile) + 2.0 * rows * hidden * math.ceil(vocab / wide)
            self._add(
                "_weigh_head",
                1,
                table,
                share=HEAD_SHARE,
                cached=cached,
                flops=2.0 * rows * hidden * vocab,
                kind="triton",
                weights=True,
            )
        self._add("_join_tiles", 1, 24.0 * rows * math.ceil(vocab / wide), kind="triton")
        if self.ranks > 1:
            packed = "packed gather" in self.changes
            # Into a list: NCCL copies each rank's part out of its buffer.
            chain = NCCL_US if packed else NCCL_US + self.ranks * GAP_US
            self._add("all_gather", 1 if packed else 5, 0.0, chain=chain, kind="collective")
            if not packed:
                self._add("all_reduce of logits", 1, 0.0, chain=NCCL_US, kind="collective")
