"""What an answer took, in the numbers that mean something together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """An end token counts as a token; the seconds include the prompt, and not loading the model."""

    tokens: int
    forwards: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.forwards} forwards, "
            f"{self.tokens / max(self.forwards, 1):.2f} tokens per forward, "
            f"{self.tokens / self.seconds:.1f} tokens/s ({self.seconds:.2f} s)"
        )
