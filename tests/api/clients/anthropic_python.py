# needs: anthropic
from anthropic import Anthropic
from asked import ANSWER, FACTS, MODEL, SUM, URL, WEATHER, Person, works

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": MODEL, "max_tokens": 4096, "messages": [{"role": "user", "content": SUM}]}
works("chat", client.messages.create(**asked).content[0].text == ANSWER)
with client.messages.stream(**asked) as stream:
    works("stream", "".join(stream.text_stream) == ANSWER)
facts = {"role": "user", "content": FACTS}
parsed = client.messages.parse(**asked | {"messages": [facts]}, output_format=Person)
works("structured", isinstance(parsed.parsed_output, Person))
tool = {"name": "weather", "input_schema": WEATHER}
called = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
works("tools", called.content[-1].name == "weather")
counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"])
works("count_tokens", counted.input_tokens > 0)
