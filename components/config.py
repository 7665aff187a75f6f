"""What every component's configuration shares: frozen, no unknown keys, errors in one sentence."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator


class Config(BaseModel):
    """A frozen configuration; unknown keys and values out of range are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    allowed = ", ".join(cls.model_fields)
                    raise ValueError(f"unknown option {name!r}{_meant(str(name), allowed)}")
        return given


def _meant(name: str, allowed: str) -> str:
    """Return what is allowed, and which of it the name looks like; a very long one like none."""
    near = get_close_matches(name, allowed.split(", "), 1) if len(name) < 64 else []
    return f", did you mean {near[0]!r}? Allowed: {allowed}" if near else f"; allowed: {allowed}"


def explain(error: ValidationError) -> str:
    """Return one sentence per mistake: where, what is allowed, what was given."""
    return "; ".join(_sentence(dict(mistake)) for mistake in error.errors())


def _sentence(mistake: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in mistake["loc"])
    prefix = f"{where}: " if where else ""
    match mistake["type"]:
        case "union_tag_invalid":
            context = mistake["ctx"]
            return f"{prefix}no kind {context['tag']!r}; allowed: {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{prefix}a 'kind' is needed"
        case "value_error":
            return prefix + str(mistake["msg"]).removeprefix("Value error, ")
        case _:
            return f"{prefix}{mistake['msg']} (given: {_shown(mistake['input'])})"


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 200 else f"{text[:200]}..."
