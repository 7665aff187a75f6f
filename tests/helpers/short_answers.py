"""What a tiny model answers, to be compared with what another does."""

from diffray import DiffusionLLM


def ids(llm: DiffusionLLM) -> list[list[int]]:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5]]
    outputs = llm.generate(prompts, max_tokens=12, ignore_eos=True, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
