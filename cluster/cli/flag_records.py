"""Flags that travel together, as one parameter of a command; `spread` makes each a flag.

They are the fields of a frozen dataclass, or chosen fields of a configuration model: then name,
type, default and help of each flag come from the field, so that no option is declared twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from diffray.components.config import Config

_CONTEXT = "typer_context"


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field becomes a flag, where --its-name and its type do not say it all."""

    names: tuple[str, ...] = ()
    metavar: str | None = None
    type: Any = None
    panel: str | None = None
    envvar: str | None = None


class Options:
    """The flags of a model's fields. An object of it holds the values that were typed."""

    model: ClassVar[type[Config]]
    panel: ClassVar[str]
    flags: ClassVar[Mapping[str, Flag]]

    def __init__(self, **typed: Any) -> None:
        self._typed = typed

    def typed(self) -> dict[str, Any]:
        """Return what was typed, by the fields' names; the model knows the other defaults."""
        return dict(self._typed)


def refuse_flags(context: typer.Context, when: str, names: Iterable[str]) -> None:
    """Refuse the parameters of these names that were typed: they would have no effect."""
    for parameter in context.command.params:
        if parameter.name in names and _was_typed(context, parameter.name):
            flag = parameter.opts[0] if parameter.param_type_name == "option" else "MODEL"
            raise ValueError(f"{flag} has no effect {when}; drop it")


def names_of(*records: type[Options]) -> set[str]:
    return {name for record in records for name in record.flags}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: a parameter that is a record gives way to its flags.

    A record that is the parameter's default says the defaults of the flags.
    """
    own = signature(command)
    hints = get_type_hints(command, include_extras=True)
    records = {name: hints[name] for name in own.parameters if _is_record(hints[name])}
    presets = {name: own.parameters[name].default for name in records}
    flags: list[Parameter] = []
    for name, parameter in own.parameters.items():
        if name in records:
            flags += _flags(records[name], presets[name])
        elif hints[name] is not typer.Context:
            flags.append(parameter.replace(annotation=hints[name]))
    contexts = [name for name in own.parameters if hints[name] is typer.Context]
    flags.append(Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @wraps(command)
    def run(**given: Any) -> None:
        context = given.pop(_CONTEXT)
        given |= dict.fromkeys(contexts, context)
        for name, record in records.items():
            if is_dataclass(record):
                values = {field.name: given.pop(field.name) for field in fields(record)}
            else:
                preset = {} if presets[name] is Parameter.empty else presets[name].typed()
                read = {flag: given.pop(flag) for flag in record.flags}
                values = preset | {f: v for f, v in read.items() if _was_typed(context, f)}
            given[name] = record(**values)
        command(**given)

    run.__signature__ = own.replace(parameters=flags)  # type: ignore[attr-defined]  # Typer reads it
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, Options))


def _flags(record: Any, preset: Any) -> Iterator[Parameter]:
    if not is_dataclass(record):
        typed = {} if preset is Parameter.empty else preset.typed()
        for name, flag in record.flags.items():
            field = record.model.model_fields[name]
            default = typed.get(name, _plain(field.default))
            kind, option = _type(field, flag), _option(name, record, default)
            yield Parameter(
                name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        return
    hints = get_type_hints(record, include_extras=True)
    for own in fields(record):
        default = _default(own) if preset is Parameter.empty else getattr(preset, own.name)
        yield Parameter(
            own.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[own.name]
        )


def _default(field: "Field[Any]") -> Any:
    return Parameter.empty if field.default is MISSING else field.default


def _plain(default: object) -> object:
    return None if default == () else default


def _option(name: str, record: type[Options], default: object) -> Any:
    field, flag = record.model.model_fields[name], record.flags[name]
    names = flag.names or (f"--{name.replace('_', '-')}",)
    parts = _parts(field.annotation)
    if bool in parts:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:])
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    text = field.description or ""
    if _item_type(parts) is not None:
        text = f"{text.removesuffix('.')}; repeatable."
    return typer.Option(
        *names,
        help=text,
        rich_help_panel=flag.panel or record.panel,
        show_default=default is not False,
        metavar=flag.metavar or ("|".join(choices) if choices else None),
        envvar=flag.envvar,
    )


def _type(field: FieldInfo, flag: Flag) -> Any:
    """Return what Typer reads a flag as: a list where it may be repeated, else one plain value."""
    if flag.type is not None:
        return flag.type | None
    parts = _parts(field.annotation)
    if (item := _item_type(parts)) is not None:
        return list[item] | None  # type: ignore[valid-type]  # known when it runs
    if get_origin(parts[0]) is Literal:
        return str | None
    return parts[0] | None


def _item_type(parts: list[Any]) -> Any:
    return next((get_args(part)[0] for part in parts if get_origin(part) is tuple), None)


def _parts(annotation: Any) -> list[Any]:
    """Return the types among which a field chooses, without None."""
    if get_origin(annotation) in (Union, UnionType):
        return [part for part in get_args(annotation) if part is not type(None)]
    return [annotation]
