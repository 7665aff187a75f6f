"""Every kernel that Triton's programs compute, with its variants."""

from typing import Final

from diffray.kernels.triton.attention import ATTEND
from diffray.kernels.triton.confidence import CONFIDENCE
from diffray.kernels.triton.experts import EXPERTS, QUANTIZED_EXPERTS
from diffray.kernels.triton.norm import ADD_NORM, RMS_NORM
from diffray.kernels.triton.router import GROUPED_SIGMOID_TOPK, SOFTMAX_TOPK

KERNELS: Final = (
    RMS_NORM,
    ADD_NORM,
    ATTEND,
    SOFTMAX_TOPK,
    GROUPED_SIGMOID_TOPK,
    EXPERTS,
    QUANTIZED_EXPERTS,
    CONFIDENCE,
)
