# needs: pydantic-ai-slim[openai,anthropic]
from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, works
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
works("chat", Agent(model).run_sync(SUM).output == ANSWER)
native = Agent(model, output_type=NativeOutput(Person)).run_sync(FACTS)
works("structured", isinstance(native.output, Person))
works("tools", isinstance(Agent(model, output_type=Person).run_sync(FACTS).output, Person))
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
works("Anthropic", Agent(messages).run_sync(SUM).output == ANSWER)
