"""What tests ask of quantized models."""

from diffray.components.denoiser import Denoiser
from diffray.components.weight import Weight


def weights_of(model: Denoiser, part: str) -> list[Weight]:
    found = [module for module in model.modules() if isinstance(module, Weight)]
    return [each for each in found if each.part == part]
