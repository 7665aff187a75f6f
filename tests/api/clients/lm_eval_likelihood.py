# needs: lm-eval[api] pydantic
import json
import os
import site
import tempfile
from pathlib import Path

import requests
from asked import ANSWER, MODEL, SUM, URL, works
from lm_eval import simple_evaluate

# The harness cannot apply a server's chat template to likelihoods, so the text is in it already.
chat = {"messages": [{"role": "user", "content": SUM}]}
tokens = requests.post(f"{URL}/tokenize", json=chat).json()["tokens"]
text = requests.post(f"{URL}/detokenize", json={"tokens": tokens}).json()["prompt"]
QUESTION = {"question": text, "choices": [ANSWER, "12+30=43", "Tokyo"], "label": 0}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}],
}
TEXT = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32},
    "metric_list": [{"metric": "exact_match"}],
}


def results(model: str, arguments: dict[str, object]) -> list[list[float]]:
    """Evaluate both tasks, which must be right; return each choice's log-probability."""
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.json"
        questions.write_text(json.dumps([QUESTION]))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(questions)}}
        data |= {"test_split": "train", "doc_to_text": "{{question}}"}
        told = simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=[{"task": "choices"} | data | CHOICES, {"task": "text"} | data | TEXT],
        )
    name = model.replace("-", " ")
    works(f"{name} choices", told["results"]["choices"]["acc,none"] == 1)
    works(f"{name} text", told["results"]["text"]["exact_match,none"] == 1)
    (sample,) = told["samples"]["choices"]
    return [[float(logprob) for logprob, _ in each] for each in sample["resps"]]


served = results("local-completions", {"model": MODEL, "base_url": f"{URL}/v1/completions"})

# In this process, with diffray and what it stands on from the tests' own environment.
site.addsitedir(os.environ["TESTS_SITE"])
import diffray.cluster.cli.evaluation.lm_eval_model  # noqa: E402, F401

own = results("diffray", {"pretrained": MODEL, "method": "left_to_right", "dtype": "float32"})
pairs = zip(served, own, strict=True)
works("same likelihoods", all(abs(a[0] - b[0]) < 1e-3 for a, b in pairs))
results("diffray", {"pretrained": MODEL, "samples": 64})
