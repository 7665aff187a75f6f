"""The stack that all models here share: embedding, layers, last norm, head.

A model file gives it a config, the MLPs and the checkpoint's names.
Letters: T packed tokens, R of them that the head reads, H hidden size, V this rank's vocabulary.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from diffray.components.attention import Attention, key_heads
from diffray.components.batch import Batch
from diffray.components.dims import Dims
from diffray.components.kv_pool import KVPool
from diffray.components.layers import Angles, Norm, Part, Parts, Rotary, VocabTable
from diffray.components.low_rank import Running
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising, ModelSpec
from diffray.components.quantization import Scheme
from diffray.components.quantized_parts import chosen_formats
from diffray.components.weight import Weight
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.confidence import Confidence, Draw


class Names(NamedTuple):
    """What the checkpoint calls the tensors that every model has."""

    embedding: str
    last_norm: str
    head: str
    layer: str  # the layers' common prefix, before the number
    attention_norm: str
    qkv: tuple[str, ...]  # three names, or one where the rows are stacked
    attention_out: str
    mlp_norm: str
    head_norms: tuple[str, ...] = ()  # of queries and keys, if they have any
    qkv_bias: tuple[str, ...] = ()  # of queries, keys and values, if they have any


class MLP(Protocol):
    """A layer's second half."""

    routed: ClassVar[bool]  # whether it has experts

    def add_norm(self, x_TH: Tensor, residual_TH: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the next residual, which is the output plus this one, and its norm."""
        ...

    def pack(self) -> None: ...

    def parts(self, prefix: str, names: Collection[str]) -> Parts: ...


class Layer(nn.Module):
    """Attention and an MLP, each after its norm and added to the residual.

    Each addition is fused with the norm that follows it, so a layer's last norm is the next
    layer's first.
    """

    def __init__(
        self,
        layer: int,
        dims: Dims,
        mlp: MLP,
        mesh: Mesh,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.attention_norm = Norm(dims.hidden, dims.norm_eps, dtype, kernels)
        self.attention = Attention(layer, dims, mesh, dtype)
        self.mlp_norm = Norm(dims.hidden, dims.norm_eps, dtype, kernels)
        self.mlp = mlp

    @property
    def routed(self) -> bool:
        return self.mlp.routed

    def forward(
        self,
        residual_TH: Tensor,
        normed_TH: Tensor,
        angles: Angles,
        batch: Batch,
        kv: KVPool,
        following: Norm,
        read_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual of the tokens in `read_R`, or of all, and its norm.

        Stores the K/V of all tokens in place.
        """
        seen_RI = self.attention(normed_TH, angles, batch, kv, read_R)
        residual_RH = residual_TH if read_R is None else residual_TH.index_select(0, read_R)
        residual_RH, normed_RH = self.attention.out.add_norm(seen_RI, residual_RH, self.mlp_norm)
        return self.mlp.add_norm(normed_RH, residual_RH, following)

    def pack(self) -> None:
        self.attention.qkv.pack()
        self.attention.out.pack()
        self.mlp.pack()

    def parts(self, prefix: str, own: Names, names: Collection[str]) -> Parts:
        qkv = self.attention.qkv
        projections = [qkv.fused_part()] if len(own.qkv) == 1 else qkv.parts()
        parts = {
            f"{prefix}.{own.attention_norm}": self.attention_norm.part(),
            f"{prefix}.{own.attention_out}": self.attention.out.part(),
            f"{prefix}.{own.mlp_norm}": self.mlp_norm.part(),
        }
        parts |= {f"{prefix}.{n}": p for n, p in zip(own.qkv, projections, strict=True)}
        if qkv.bias_O is not None:
            biases = qkv.bias_parts()
            parts |= {f"{prefix}.{n}": p for n, p in zip(own.qkv_bias, biases, strict=True)}
        if self.attention.norm is not None:
            norms = self.attention.norm.parts()
            parts |= {f"{prefix}.{n}": p for n, p in zip(own.head_norms, norms, strict=True)}
        return parts | self.mlp.parts(prefix, names)


class OwnStack(NamedTuple):
    """A family's replacements for `Layer`, `Rotary` and `Norm`, called in the same way."""

    layers: Iterable[Any]
    rotary: Any
    norm: Any


class Denoiser(nn.Module):
    """A model as the rest of the code sees it: built on meta, then allocated and loaded."""

    def __init__(
        self,
        dims: Dims,
        mlps: Iterable[MLP],
        names: Names,
        mesh: Mesh,
        dtype: torch.dtype,
        denoising: Denoising,
        kernels: Kernels = TORCH,
        own: OwnStack | None = None,
    ) -> None:
        super().__init__()
        if own is None:
            own = OwnStack(
                [Layer(at, dims, mlp, mesh, dtype, kernels) for at, mlp in enumerate(mlps)],
                Rotary(dims.rope, dims.rotated),
                Norm(dims.hidden, dims.norm_eps, dtype, kernels),
            )
        self.dims, self.names, self.kernels = dims, names, kernels
        self.running = Running()
        self.embedding = VocabTable("embedding", dims.vocab, dims.hidden, mesh, dtype)
        self.rotary, self.norm = own.rotary, own.norm
        self.stack: list[Any] = list(own.layers)
        self.layers = nn.ModuleList(self.stack)  # the same layers, registered
        self.output = self.embedding
        if not dims.tied:
            self.output = VocabTable("head", dims.vocab, dims.hidden, mesh, dtype)
        first_key, last_key = key_heads(mesh, dims.kv_heads)
        self.spec = ModelSpec(
            num_layers=dims.layers,
            num_kv_heads=last_key - first_key,
            head_dim=dims.head_dim,
            hidden_size=dims.hidden,
            vocab_size=dims.vocab,
            vocab_start=self.output.rows.start,
            max_positions=dims.rope.positions,
            block_causal=denoising.block_causal,
            block_length=denoising.block_length,
            canvas_length=0 if denoising.block_causal else denoising.canvas_length,
            logit_shift=denoising.logit_shift,
            family=dims.family,
            decoder=denoising.decoder,
            sampler=denoising.sampler,
            own_iterations=denoising.iterations,
            masked=denoising.masked,
            encodes=denoising.encodes,
            next_token=denoising.next_token,
            iteration=denoising.iteration,
        )

    @property
    def routed(self) -> bool:
        """Whether there are experts to distribute over ranks."""
        return any(layer.routed for layer in self.stack)

    @property
    def experts(self) -> tuple[int, int]:
        """The number of experts of a sparse layer, and of experts per token; zeros if dense."""
        mlps = (layer.mlp for layer in self.stack if layer.routed)
        return next(((mlp.experts.experts.rows, mlp.router.chosen) for mlp in mlps), (0, 0))

    @property
    def device(self) -> torch.device:
        return next(self.embedding.weight.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.embedding.embed(ids_T)

    def look(self, pixels_PC: Tensor, columns: int) -> Tensor:
        raise AssertionError("a model without sight is given no images")

    def soften(self, x_TH: Tensor, soft_TH: Tensor, batch: Batch) -> Tensor:
        assert batch.masked_T1 is not None
        return x_TH + soft_TH * batch.masked_T1

    def forward(self, x_TH: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        self.running.adapted = batch.adapted
        angles = self.rotary(batch.positions_T)
        last = self.stack[-1]
        residual_TH, normed_TH = self.stack[0].attention_norm(x_TH, None)
        for layer, after in pairwise(self.stack):
            following = after.attention_norm
            residual_TH, normed_TH = layer(residual_TH, normed_TH, angles, batch, kv, following)
        # No layer follows the last, so it computes only the tokens that are read.
        steps = angles, batch, kv, self.norm, batch.read_R
        hidden_RH: Tensor = last(residual_TH, normed_TH, *steps)[1]
        if batch.read_R is None:
            return hidden_RH
        return torch.empty_like(x_TH).index_copy_(0, batch.read_R, hidden_RH)

    def head(self, hidden_RH: Tensor) -> Tensor:
        return self.output.logits(hidden_RH)

    def confidence(
        self,
        hidden_RH: Tensor,
        mask_token_id: int,
        draw: Draw | None,
        known_RK: Tensor | None = None,
    ) -> Confidence:
        table, start = self.output, self.output.rows.start
        gather_RK = self.gathered(hidden_RH, mask_token_id, known_RK)
        if table.weight.format is not None:
            logits_RV, choose = table.logits(hidden_RH), self.kernels.confidence_of_logits
            return choose(logits_RV, start, mask_token_id, gather_RK, draw)
        head = table.weight_VH, start
        return self.kernels.confidence(hidden_RH, *head, mask_token_id, gather_RK, draw)

    def gathered(self, hidden_RH: Tensor, mask_token_id: int, known_RK: Tensor | None) -> Tensor:
        """Return the ids whose logits are looked up in each row: the mask's, and the known ones."""
        mask_R1 = torch.full((len(hidden_RH), 1), mask_token_id, device=hidden_RH.device)
        return mask_R1 if known_RK is None else torch.cat([mask_R1, known_RK], dim=1)

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        return self.embedding.mix(weights_RV)

    def allocate(self, device: torch.device) -> None:
        """Give every parameter storage on `device`; only the rotary tables have values yet."""

        def empty(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        # Like `to_empty`, but its empty_like on meta tensors imports sympy, taking half a second.
        self._apply(empty)  # type: ignore[no-untyped-call]  # torch's own has no types
        self.rotary.fill()

    def keep_one_layer(self) -> None:
        """Drop all layers but one, with experts if any layer has them; call before `allocate`."""
        layer = next((each for each in self.stack if each.routed), self.stack[0])
        layer.attention.layer = 0
        self.stack, self.layers = [layer], nn.ModuleList([layer])
        self.spec = replace(self.spec, num_layers=1, own_shapes=())

    def pack(self) -> None:
        """Lay the loaded matrices out in the order in which this device reads them fastest."""
        for layer in self.stack:
            layer.pack()
        form = self.output.weight.format  # a tied head is also read by rows, as blocks can be
        if self.output is not self.embedding or (form is not None and form.in_blocks):
            self.output.pack()

    @property
    def in_blocks(self) -> bool:
        """Whether the matrices of its layers are in blocks that a CPU multiplies as integers."""
        matrices = (module for module in self.layers.modules() if isinstance(module, Weight))
        return any(each.format is not None and each.kept.is_tiled for each in matrices)

    @property
    def num_weights(self) -> int:
        """How many weights this rank has, whatever memory they take."""
        matrices = [module for module in self.modules() if isinstance(module, Weight)]
        kept = sum(weight.numel() for each in matrices for weight in each.parameters())
        others = sum(weight.numel() for weight in self.parameters()) - kept
        return others + sum(each.count for each in matrices)

    @property
    def nbytes(self) -> int:
        """The memory of this rank's weights and tables."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def quantize(self, scheme: Scheme, names: Collection[str] = ()) -> None:
        """Keep matrices in the formats of a scheme, before or after they are loaded.

        Patterns match the checkpoint's names. Refuse formats that do not fit, before any change.
        """
        for weight, form in chosen_formats(self.parts(names), scheme):
            weight.quantize(form, self.kernels.quantized_linear)

    def unpack(self) -> bool:
        """Restore the layout of packed matrices, one by one; return whether any was packed."""
        weights = [module for module in self.modules() if isinstance(module, Weight)]
        return any([weight.unpack() for weight in weights])

    def parts(self, names: Collection[str]) -> Parts:
        """Return where each tensor of the checkpoint goes, in the layout that its names show."""
        output = self.output.part()
        parts = {
            self.names.embedding: self.embedding.part(),
            self.names.last_norm: self.norm.part(),
            # A tied checkpoint may still carry the head; it equals the embedding.
            self.names.head: Part(output.shape, optional=True) if self.dims.tied else output,
        }
        for index, layer in enumerate(self.stack):
            parts |= layer.parts(f"{self.names.layer}.{index}", self.names, names)
        return parts
