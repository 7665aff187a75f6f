"""Draws a canvas while it is denoised: `python examples/animate.py` writes docs/denoising.svg.

The demo model answers one question, and a token becomes final only at a high confidence.
"""

import argparse
from pathlib import Path

from diffray import CompletionOutput, DiffusionLLM
from diffray.cluster.frontend.views import picture
from diffray.components.checkpoints.demos import EXAMPLE

DIFFUSION = {"decoder": {"kind": "threshold", "threshold": 0.95}}


def generate(question: str) -> CompletionOutput:
    """Return the answer, which records the step at which each token became final."""
    with DiffusionLLM("demo") as llm:
        messages = [{"role": "user", "content": question}]
        (output,) = llm.chat(messages, max_tokens=64, diffusion=DIFFUSION)
    return output.outputs[0]


def main() -> None:
    """Generate an answer and write its picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/denoising.svg"))
    out = parser.parse_args().out
    answer = generate(EXAMPLE)
    out.write_text(picture(EXAMPLE, answer.visible))
    print(f"{out}: {len(answer.visible)} tokens in {answer.forwards} steps")


if __name__ == "__main__":
    main()
