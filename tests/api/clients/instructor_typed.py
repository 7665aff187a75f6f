# needs: instructor
import instructor
from asked import FACTS, MODEL, URL, Person, works
from openai import OpenAI

# Its mode JSON has the schema in the prompt alone, which the demo model cannot read.
for mode, capability in (("JSON_SCHEMA", "structured"), ("TOOLS", "tools")):
    client = instructor.from_openai(
        OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0),
        mode=getattr(instructor.Mode, mode),
    )
    person = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": FACTS}],
        max_retries=1,
        response_model=Person,
    )
    works(capability, isinstance(person, Person))
