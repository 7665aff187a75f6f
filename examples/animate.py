"""Draws a canvas while it is denoised: `python examples/animate.py` writes docs/denoising.svg.

The demo model answers one question, and a token becomes final only at a high confidence. With
`--model demo-chat --out docs/drafting.svg` drafts are shown too.
"""

import argparse
from pathlib import Path

from diffray import CompletionOutput, DiffusionLLM
from diffray.cluster.frontend.views import picture
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, examples

DIFFUSION = {"decoder": {"kind": "threshold", "threshold": 0.95}}
Draft = tuple[str, int, int]  # its text, the step after which it stood there, and its position


def generate(model: str, question: str) -> tuple[CompletionOutput, list[Draft]]:
    """Return the answer, which records the step at which each token became final, and drafts."""
    diffusion = DIFFUSION if model in DEMOS else {}
    messages, drafts = [{"role": "user", "content": question}], list[Draft]()
    with DiffusionLLM(model) as llm:
        assert llm.tokenizer is not None
        (output,) = llm.chat(messages, max_tokens=64, diffusion=diffusion)
        for step, canvas in enumerate(llm.watch(messages, max_tokens=64, diffusion=diffusion)):
            for at, token in enumerate(canvas[canvas.final :], canvas.final):
                if token is not None:
                    drafts.append((llm.tokenizer.decode([token]), step, at))
    return output.outputs[0], drafts


def main() -> None:
    """Generate an answer and write its picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/denoising.svg"))
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    question = EXAMPLE if args.model in DEMOS else examples(args.model)[-1]
    answer, drafts = generate(args.model, question)
    args.out.write_text(picture(question, answer.visible, drafts))
    print(f"{args.out}: {len(answer.visible)} tokens in {answer.forwards} steps")


if __name__ == "__main__":
    main()
