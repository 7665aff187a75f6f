"""Adapters of routed experts, at one layer: whose rows change, and to what."""

import pytest
import torch
from torch import Tensor

from diffray.components.experts import Experts
from diffray.components.lora import LoRA
from diffray.components.low_rank import Adapted, Delta, Deltas, LowRank, Running
from diffray.components.mesh import Mesh
from diffray.kernels.choose import TORCH
from diffray.kernels.router import Routing

TOKENS, EXPERTS, HIDDEN, WIDTH, CHOSEN = 24, 8, 32, 16, 3
LORAS = LoRA("first", "", 1), LoRA("second", "", 2), LoRA("of attention", "", 3)


def layer(dtype: torch.dtype, running: Running) -> Experts:
    """Return experts; the first two adapters change the matrices of some of them."""
    experts = Experts(EXPERTS, HIDDEN, WIDTH, Mesh(), dtype, TORCH)
    for weight in (experts.w31, experts.w2):
        shape = weight.plain.shape
        weight.dense = torch.nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=False)
        weight.lora = LowRank(running)
        for lora, adapted in zip(LORAS, (range(0, EXPERTS, 2), range(3)), strict=False):
            weight.lora.deltas[lora] = {
                expert: Deltas(
                    Delta(
                        torch.randn(2, shape[2], dtype=dtype),
                        torch.randn(2, shape[1] // 2, dtype=dtype),
                        start,
                    )
                    for start in (0, shape[1] // 2)
                )
                for expert in adapted
            }
    return experts


def drawn(dtype: torch.dtype) -> tuple[Tensor, Routing]:
    ids_TK = torch.rand(TOKENS, EXPERTS).topk(CHOSEN).indices
    return torch.randn(TOKENS, HIDDEN, dtype=dtype), Routing(ids_TK, torch.rand(TOKENS, CHOSEN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_others_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    running = Running()
    experts, (x_TH, routing) = layer(dtype, running), drawn(dtype)
    plain_TH = experts(x_TH, routing)
    rows = [torch.arange(start, TOKENS, 4) for start in range(3)]
    running.adapted = tuple(map(Adapted, LORAS, rows))
    changed_T = (experts(x_TH, routing) != plain_TH).any(1)
    own_T = torch.arange(TOKENS) % 4
    assert not changed_T[own_T > 1].any()
    for own, adapted in ((0, 2 * torch.arange(4)), (1, torch.arange(3))):
        chosen_T = torch.isin(routing.ids_TK, adapted).any(1)
        assert changed_T[(own_T == own) & chosen_T].all()
