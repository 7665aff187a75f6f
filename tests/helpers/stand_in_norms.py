"""A kernel with a wrong, a slow and a right variant, none of which ends its process."""

from typing import Final

from diffray.kernels import norm
from tests.helpers.stand_in_kernels import kernel_of, right, slow, wrong

KERNELS: Final = (kernel_of("rms_norm", norm.rms_norm, wrong, slow, right),)
