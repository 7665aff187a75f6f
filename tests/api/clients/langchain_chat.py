# needs: langchain-openai langchain-anthropic
from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, weather, works
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none")
works("chat", model.invoke(SUM).content == ANSWER)
works("stream", "".join(chunk.content for chunk in model.stream(SUM)) == ANSWER)
for method, capability in (("json_schema", "structured"), ("function_calling", "typed by a tool")):
    person = model.with_structured_output(Person, method=method).invoke(FACTS)
    works(capability, isinstance(person, Person))
(call,) = model.bind_tools([weather], tool_choice="weather").invoke(SUM).tool_calls
works("tools", weather(**call["args"]).startswith("sunny"))
messages = ChatAnthropic(model=MODEL, base_url=URL, api_key="none")
works("Anthropic", messages.invoke(SUM).content == ANSWER)
