"""Every kernel that has a Triton program."""

from typing import Final

from diffray.kernels.triton.acceptance import SETTLE
from diffray.kernels.triton.attention import ATTEND
from diffray.kernels.triton.byte_product import QUANTIZED_LINEAR
from diffray.kernels.triton.confidence import CONFIDENCE
from diffray.kernels.triton.credit import REWARD
from diffray.kernels.triton.experts import EXPERTS, EXPERTS_ADD_NORM
from diffray.kernels.triton.norm import ADD_NORM, LINEAR_ADD_NORM, RMS_NORM
from diffray.kernels.triton.quantized_kv import QUANTIZED_ATTEND
from diffray.kernels.triton.router import GROUPED_SIGMOID_ROUTER, SOFTMAX_ROUTER

KERNELS: Final = (
    RMS_NORM,
    ADD_NORM,
    LINEAR_ADD_NORM,
    QUANTIZED_LINEAR,
    ATTEND,
    QUANTIZED_ATTEND,
    SOFTMAX_ROUTER,
    GROUPED_SIGMOID_ROUTER,
    EXPERTS,
    EXPERTS_ADD_NORM,
    CONFIDENCE,
    REWARD,
    SETTLE,
)
