"""The base of every component's configuration: frozen, no unknown keys, short errors."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Final, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

LARGEST: Final = 2**31 - 1  # limit of a policy's numbers: products of two of them fit 64 bits


class Config(BaseModel):
    """A frozen configuration; unknown keys and values out of range are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    # What to write instead of names of other projects, or of a part's fields.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(explain(error)) from None

    # Hence pydantic builds nested parts without the above: only the whole knows their place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as BaseModel's own has

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names_and_no_kinds(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, value in given.items():
                if name not in cls.model_fields:
                    if name in cls.elsewhere:
                        raise ValueError(f"unknown option {name!r}; {cls.elsewhere[name]}")
                    allowed = ", ".join(cls.model_fields)
                    near = did_you_mean(str(name), cls.model_fields)
                    raise ValueError(
                        f"unknown option {name!r}{near} Allowed: {allowed}"
                        if near
                        else f"unknown option {name!r}; allowed: {allowed}"
                    )
                if sentence := _without_kind(value, cls.model_fields[name].annotation):
                    mistake = PydanticCustomError("no_kind", "{sentence}", {"sentence": sentence})
                    raise ValidationError.from_exception_data(
                        cls.__name__, [InitErrorDetails(type=mistake, loc=(name,), input=value)]
                    )
        return given


class PolicyPart(Config):
    """A part of how a request is denoised; its numbers fit their tensors."""

    @field_validator("*")
    @classmethod
    def _fits_tensors(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not -LARGEST <= given <= LARGEST:
            raise PydanticCustomError(
                "too_large", f"expected a number from {-LARGEST} to {LARGEST}"
            )
        return given


def _without_kind(given: object, annotation: Any) -> str | None:
    """Return what to write if a part of a field with several kinds has no kind."""
    if not (isinstance(given, str) or (isinstance(given, dict) and "kind" not in given)):
        return None
    kinds = _kinds(annotation)
    allowed = ", ".join(repr(kind) for kind in kinds)
    match given:
        case _ if not kinds:
            return None
        case str() if given in kinds:
            return f'write {{"kind": "{given}"}}'
        case str():
            return f'write {{"kind": ...}} with one of {allowed}'
        case _:
            return f"a 'kind' is needed; allowed: {allowed}"


def _kinds(annotation: Any) -> list[str]:
    """Return the kinds of a field's union; empty if it is not such a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        kind = annotation.model_fields.get("kind")
        return [kind.default] if kind else []
    return [kind for part in get_args(annotation) for kind in _kinds(part)]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a suggestion if an unknown name resembles an allowed one.

    It follows the name: `'temprature', did you mean 'temperature'?`.
    """
    near = get_close_matches(name, list(allowed), 1) if len(name) < 64 else []
    return f", did you mean {near[0]!r}?" if near else ""


def explain(error: ValidationError) -> str:
    """Return one sentence per mistake: where, what is allowed, what was given."""
    return "; ".join(_sentence(dict(mistake)) for mistake in error.errors())


def _sentence(mistake: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in mistake["loc"])
    prefix = f"{where}: " if where else ""
    match mistake["type"]:
        case "union_tag_invalid":
            return prefix + wrong_kind(mistake["ctx"])
        case "value_error" | "no_kind":
            return prefix + str(mistake["msg"]).removeprefix("Value error, ")
        case _:
            return f"{prefix}{mistake['msg']} (given: {_shown(mistake['input'])})"


def wrong_kind(context: Mapping[str, Any]) -> str:
    """Translate pydantic's "union_tag_invalid"."""
    tag, allowed = str(context["tag"]), str(context["expected_tags"])
    near = did_you_mean(tag, (kind.strip("'") for kind in allowed.split(", ")))
    allowed = f"{near} Allowed: {allowed}" if near else f"; allowed: {allowed}"
    return f"no kind {_shown(tag)}{allowed}"


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 200 else f"{text[:200]}..."
