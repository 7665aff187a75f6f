# needs: lm-eval[api] pydantic
import json
import tempfile
from pathlib import Path

from asked import ANSWER, MODEL, SUM, URL, works
from lm_eval import simple_evaluate

with tempfile.TemporaryDirectory() as folder:
    questions = Path(folder) / "questions.json"
    questions.write_text(json.dumps([{"question": SUM, "answer": ANSWER}]))
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": str(questions)},
        "test_split": "train", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": []},
    }  # fmt: skip
    told = simple_evaluate(
        model="local-chat-completions",
        model_args={"model": MODEL, "base_url": f"{URL}/v1/chat/completions"},
        tasks=[task],
        apply_chat_template=True,
    )
works("generate_until", told["results"]["sums"]["exact_match,none"] == 1)
