# needs: llama-index-llms-openai-like
from asked import ANSWER, FACTS, MODEL, SUM, URL, Person, works
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True,
    is_function_calling_model=True,
)  # fmt: skip
asked = [ChatMessage(role="user", content=SUM)]
works("chat", model.chat(asked).message.content == ANSWER)
works("stream", "".join(chunk.delta or "" for chunk in model.stream_chat(asked)) == ANSWER)
person = model.structured_predict(Person, PromptTemplate(FACTS), {"tool_choice": "required"})
works("tools", isinstance(person, Person))
