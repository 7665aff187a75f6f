# needs: litellm
import litellm
from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, works

asked = {"api_key": "none", "messages": [{"role": "user", "content": SUM}]}
chat = asked | {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"}
works("chat", litellm.completion(**chat).choices[0].message.content == ANSWER)
chunks = litellm.completion(**chat, stream=True)
works("stream", "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER)
facts = chat | {"messages": [{"role": "user", "content": FACTS}]}
told = litellm.completion(**facts, response_format=Person).choices[0].message.content
works("structured", isinstance(Person.model_validate_json(told), Person))
vllm = asked | {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"}
works("vLLM", litellm.completion(**vllm).choices[0].message.content == ANSWER)
messages = asked | {"model": f"anthropic/{MODEL}", "api_base": URL}
works("Anthropic", litellm.completion(**messages).choices[0].message.content == ANSWER)
