"""Write a model's own greedy answers: `python -m examples.train_drafter.answers MODEL --out FILE`.

A line has a prompt's number, its tokens and those of the answer. The same command goes on where it
stopped.
"""

import argparse
import json
from pathlib import Path

from diffray import DiffusionLLM, SamplingParams
from examples.train_drafter.prompts import prompts


def written(file: Path) -> set[int]:
    """Return the numbers of the answers in a file, whose last line may be incomplete."""
    if not file.is_file():
        return set()
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return {json.loads(line)["number"] for line in whole.splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files of JSON lines")
    parser.add_argument("--most", type=int, help="prompts")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer")
    args = parser.parse_args()
    asked = prompts(args.prompts)[: args.most]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    left = sorted({*range(len(asked))} - written(args.out))
    params = SamplingParams(max_tokens=args.tokens, diffusion={"iteration": "autoregressive"})
    with DiffusionLLM(args.model, max_num_seqs=48) as llm, args.out.open("a") as out:
        for first in range(0, len(left), 96):
            numbers = left[first : first + 96]
            chats = [[{"role": "user", "content": asked[number]}] for number in numbers]
            for number, output in zip(numbers, llm.chat(chats, params), strict=True):
                line = {"number": number, "prompt": [*output.prompt_token_ids]}
                out.write(json.dumps(line | {"ids": output.outputs[0].token_ids}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
