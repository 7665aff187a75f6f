"""The base of every component's configuration: frozen, no unknown keys, short errors."""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, ClassVar, Final, LiteralString, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from diffray.components.spelling import did_you_mean

LARGEST: Final = 2**31 - 1  # number in a policy: the product of two still fits 64 bits
# Fields that hold one of several models: pydantic appends the kind to the path, we do not.
UNIONS: Final = ("iteration", "decoder", "cache")


class InvalidField(ValueError):
    """A value that cannot be used: a sentence for people, and the field's dotted name for programs.

    The name is None where no single field is to blame.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def not_given(model: type[BaseModel], names: Iterable[str], more: str = "") -> dict[str, Any]:
    """Return fields of a model for `create_model`: the same, but None if they are not given.

    `more` is added to the descriptions of those that have a default, which it may name.
    """
    fields = {}
    for name in names:
        field = copy(model.model_fields[name])
        kind: Any = field.annotation
        if field.default is not None:
            default = json.dumps(field.default)
            field.description = f"{field.description}{more.format(default=default)}"
        field.default, field.default_factory = None, None
        fields[name] = (kind | None, field)
    return fields


class Config(BaseModel):
    """A frozen configuration; unknown keys and values out of range are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )
    # What to write instead of other projects' names, or of fields that belong to a part.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise InvalidField(explain(error), field_of(error)) from None

    # Lets pydantic build nested parts without this __init__: only the outermost knows their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as BaseModel's own has

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out fields that have their default."""
        for name, value in super().__repr_args__():
            if name is None or value != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                yield name, value

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names_and_missing_kinds(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, value in given.items():
                if name not in cls.model_fields:
                    raise cls._mistake("unknown_option", str(name), value, cls._unknown(str(name)))
                if sentence := _without_kind(value, cls.model_fields[name].annotation):
                    raise cls._mistake("no_kind", name, value, sentence)
        return given

    @classmethod
    def _unknown(cls, name: str) -> str:
        if name in cls.elsewhere:
            return f"unknown option {name!r}; {cls.elsewhere[name]}"
        allowed, near = ", ".join(cls.model_fields), did_you_mean(name, cls.model_fields)
        return f"unknown option {name!r}" + (
            f"{near} Allowed: {allowed}" if near else f"; allowed: {allowed}"
        )

    @classmethod
    def _mistake(cls, kind: LiteralString, name: str, value: Any, sentence: str) -> ValidationError:
        mistake = PydanticCustomError(kind, "{sentence}", {"sentence": sentence})
        return ValidationError.from_exception_data(
            cls.__name__, [InitErrorDetails(type=mistake, loc=(name,), input=value)]
        )


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


class OrKind:
    """An annotation of parts: the name of a kind stands for that kind with its defaults."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        self._kinds = kinds(source)
        return no_info_before_validator_function(_spelt_out, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "enum": self._kinds}]}


def _spelt_out(given: Any) -> Any:
    return {"kind": given} if isinstance(given, str) else given


def _without_kind(given: object, annotation: Any) -> str | None:
    """Return what to write if a part lacks its kind, in a field that takes several kinds."""
    if not (isinstance(given, dict) and "kind" not in given and (found := kinds(annotation))):
        return None
    return f"a 'kind' is needed; allowed: {', '.join(map(repr, found))}"


def kinds(annotation: Any) -> list[str]:
    """Return the kinds of a field's union; empty if it is not such a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        kind = annotation.model_fields.get("kind")
        return [kind.default] if kind else []
    return [kind for part in get_args(annotation) for kind in kinds(part)]


def explain(error: ValidationError, names: Mapping[str, str] | None = None) -> str:
    """Return one sentence per mistake: where, what is allowed, what was given.

    `names` maps our fields' paths to what the user wrote, which stands for their parts as well.
    """
    return "; ".join(sentence(mistake, names or {}) for mistake in error.errors(include_url=False))


def sentence(mistake: ErrorDetails, names: Mapping[str, str] | None = None) -> str:
    """Return the sentence for one mistake, the same for every interface."""
    kind, loc = mistake["type"], mistake["loc"]
    where = dotted(loc[:-1] if kind == "unknown_option" else loc)
    where = _as_written(where, names or {})
    prefix = f"{where}: " if where else ""
    match kind:
        case "union_tag_invalid":
            return prefix + _wrong_kind(mistake["ctx"])
        case "value_error" | "no_kind" | "unknown_option":
            said = mistake["msg"].removeprefix("Value error, ")
            return prefix + said.removeprefix(f"{loc[-1]} is " if loc else "")
        case _:
            return f"{prefix}{mistake['msg']}{_shown(mistake['input'])}"


def _as_written(where: str, names: Mapping[str, str]) -> str:
    """Return what the user wrote for a field's path, or for the nearest part around it."""
    parts = where.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((names[path] for path in around if path in names), where)


def field_of(error: ValidationError) -> str | None:
    """Return the dotted name of the first field that is wrong."""
    mistake = error.errors(include_url=False)[0]
    loc = mistake["loc"]
    cause = mistake.get("ctx", {}).get("error")
    if isinstance(cause, InvalidField) and cause.field is not None:
        loc = (*loc, cause.field)
    elif not loc:
        return None
    whole = next((at for at, part in enumerate(loc) if isinstance(part, int)), len(loc))
    return dotted(loc[:whole])  # a list's name, not the number of its item


def dotted(loc: tuple[int | str, ...]) -> str:
    """Return the path of a mistake as users write it, without the kinds of parts."""
    return ".".join(
        str(part) for at, part in enumerate(loc) if at == 0 or loc[at - 1] not in UNIONS
    )


def _wrong_kind(context: Mapping[str, Any]) -> str:
    """Return the sentence for pydantic's "union_tag_invalid"."""
    tag, allowed = str(context["tag"]), str(context["expected_tags"])
    near = did_you_mean(tag, (kind.strip("'") for kind in allowed.split(", ")))
    allowed = f"{near} Allowed: {allowed}" if near else f"; allowed: {allowed}"
    return f"no kind {shortened(repr(tag))}{allowed}"


def _shown(given: object) -> str:
    """Return the given value if it is a scalar; an object may have megabytes."""
    if not isinstance(given, str | int | float | None):
        return ""
    return f" (given: {shortened(repr(given))})"


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 forward, 2 forwards."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(text: str, most: int = 100) -> str:
    """Return a text, without its middle if it is long."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
