# needs: autogen-agentchat autogen-ext[openai]
import asyncio

from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, works
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
model = OpenAIChatCompletionClient(
    model=MODEL, base_url=f"{URL}/v1", api_key="none", model_info=info | {"family": "unknown"}
)


async def ask() -> None:
    plain = AssistantAgent("plain", model, system_message=None)
    works("chat", (await plain.run(task=SUM)).messages[-1].content == ANSWER)
    typed = AssistantAgent("typed", model, system_message=None, output_content_type=Person)
    works("structured", isinstance((await typed.run(task=FACTS)).messages[-1].content, Person))


asyncio.run(ask())
