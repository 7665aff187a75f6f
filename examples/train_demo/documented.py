"""The questions that documents, help and messages ask the demo models, and the right answers."""

from examples.train_demo.words import bank

BANK = bank("documented")
EXAMPLE: str = BANK["example"]
FUNCTION: str = BANK["function"]
ANSWERS: dict[str, str] = BANK["answers"]
