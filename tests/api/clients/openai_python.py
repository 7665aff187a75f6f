# needs: openai
from asked import ANSWER, FACTS, MODEL, SUM, URL, WEATHER, Person, works
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = {"model": MODEL, "messages": [{"role": "user", "content": SUM}]}
works("chat", client.chat.completions.create(**asked).choices[0].message.content == ANSWER)
chunks = client.chat.completions.create(**asked, stream=True)
works("stream", "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER)
facts = {"model": MODEL, "messages": [{"role": "user", "content": FACTS}]}
parsed = client.chat.completions.parse(**facts, response_format=Person)
works("structured", isinstance(parsed.choices[0].message.parsed, Person))
function = {"name": "weather", "parameters": WEATHER}
called = client.chat.completions.create(
    **asked, tools=[{"type": "function", "function": function}], tool_choice="required"
)
works("tools", called.choices[0].message.tool_calls[0].function.name == "weather")
works("responses", client.responses.create(model=MODEL, input=SUM).output_text == ANSWER)
works("models", MODEL in [model.id for model in client.models.list()])
