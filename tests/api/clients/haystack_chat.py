# needs: haystack-ai
from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, works
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

model = OpenAIChatGenerator(
    model=MODEL, api_base_url=f"{URL}/v1", api_key=Secret.from_token("none")
)
works("chat", model.run([ChatMessage.from_user(SUM)])["replies"][0].text == ANSWER)
pieces = []
model.run([ChatMessage.from_user(SUM)], streaming_callback=lambda c: pieces.append(c.content))
works("stream", "".join(pieces) == ANSWER)
facts = [ChatMessage.from_user(FACTS)]
told = model.run(facts, generation_kwargs={"response_format": Person})["replies"][0].text
works("structured", isinstance(Person.model_validate_json(told), Person))
