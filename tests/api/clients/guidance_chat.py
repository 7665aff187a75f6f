# needs: guidance openai
from asked import ANSWER, MODEL, SUM, URL, works
from guidance import assistant, gen, user
from guidance.models import OpenAI

told = OpenAI(MODEL, base_url=f"{URL}/v1", api_key="none")
with user():
    told += SUM
with assistant():
    told += gen("answer")
works("chat", told["answer"] == ANSWER)
