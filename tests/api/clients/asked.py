"""What every client is asked, and how a script reports what worked: one line a capability."""

import sys
from typing import Literal

from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1], sys.argv[2]
SUM, ANSWER = "What is 12 plus 30?", "12+30=42"
FACTS = "Give job and age as JSON: Tom, 53, is a driver from Tokyo."


class Person(BaseModel):
    """What FACTS asks for."""

    job: Literal["nurse", "driver", "pilot"]
    age: int = Field(ge=18, le=99)


def weather(city: Literal["Rome", "Tokyo"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Tokyo"]}},
    "required": ["city"],
}


def works(capability: str, condition: bool) -> None:
    assert condition, capability
    print(capability)
