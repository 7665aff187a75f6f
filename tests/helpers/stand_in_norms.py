"""A kernel with a wrong, a slow and a right variant, none of which ends its process."""

from typing import Final

from tests.helpers.stand_in_kernels import kernel_of, norm, right, slow, wrong

KERNELS: Final = (kernel_of("rms_norm", norm.rms_norm, wrong, slow, right),)
