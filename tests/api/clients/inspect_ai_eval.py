# needs: inspect-ai openai anthropic
import tempfile

from asked import ANSWER, MODEL, SUM, URL, works
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import exact

for provider, url, capability in (("openai", f"{URL}/v1", "chat"), ("anthropic", URL, "Anthropic")):
    task = Task(dataset=[Sample(input=SUM, target=ANSWER)], scorer=exact())
    model = get_model(f"{provider}/{MODEL}", base_url=url, api_key="none")
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, log_dir=logs, display="none")
        works(capability, log.samples[0].output.completion == ANSWER)
