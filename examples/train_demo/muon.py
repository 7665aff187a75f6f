"""Muon: momentum whose matrices are made orthogonal before they are applied.

After K. Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/). On these small models it
reaches a loss in about half of AdamW's steps. Experts, stacked as [E, rows, columns], are so many
matrices.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
         (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # fmt: skip


def orthogonal(update: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of `update` = U S V^T, by a Newton-Schulz iteration of the fifth order."""
    x = update.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in STEPS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result.to(update.dtype)


class Muon(Optimizer):
    def __init__(
        self,
        params: Iterable[Tensor],
        dtype: torch.dtype,
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        """`dtype` is that of the products in the iteration."""
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonal(gradient.lerp(state["momentum"], group["momentum"]), self.dtype)
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
