"""Related flags as one parameter of a command, a record; `spread` makes each field a flag.

A record is a frozen dataclass whose fields are made by `flag`. It may name a configuration model
that declares the same fields: their help then comes from there, and they are None unless typed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from diffray.cluster.cli.help import WORDS
from diffray.components.config import Config

T = TypeVar("T")


def flag(default: Any = None, *names: str, **more: Any) -> Any:
    """Return a field of a record; `names` and `more` are the arguments of `typer.Option`."""
    return field(default=default, metadata={"names": names, "more": more})


@dataclass_transform(frozen_default=True)
def record(panel: str, model: type[Config] | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a record, whose flags appear in help under the heading `panel`."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__record__ = panel, model  # type: ignore[attr-defined]  # read in _flags
        return dataclass(frozen=True, slots=True)(cls)

    return decorate


def typed(flags: Any) -> dict[str, Any]:
    """Return the values of a record that are set."""
    return {name: value for name, value in asdict(flags).items() if value not in (None, [])}


def names_of(*records: Any) -> set[str]:
    return {each.name for flags in records for each in fields(flags)}


def paths_to_flags(context: typer.Context, sections: Mapping[str, Iterable[Any]]) -> dict[str, str]:
    """Return the flag of each field of some records, by the path of a configuration's option."""
    flags = {
        parameter.name: _typed_name(parameter, context) for parameter in context.command.params
    }
    return {
        f"{section}.{name}": flags[name]
        for section, records in sections.items()
        for name in names_of(*records)
    }


def refuse_flags(context: typer.Context, when: str, names: Iterable[str]) -> None:
    """Refuse named parameters that were typed, because they would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{_typed_name(parameter, context)} has no effect {when}; drop it")


def _typed_name(parameter: Any, context: typer.Context) -> str:
    """Return the name under which an option was typed, or else its first one."""
    if parameter.param_type_name != "option":
        return "MODEL"
    names = [*parameter.opts, *parameter.secondary_opts]
    found = {word.partition("=")[0] for word in context.meta[WORDS]}
    return next((name for name in names if name in found), str(names[0]))


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it, with the flags of its records as parameters."""
    own = signature(command)
    records: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in own.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    flags: list[Parameter] = []
    for name, parameter in own.parameters.items():
        flags += _flags(records[name]) if name in records else [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, made in records.items():
            given[name] = made(**{each.name: given.pop(each.name) for each in fields(made)})
        command(**given)

    run.__signature__ = own.replace(parameters=flags)  # type: ignore[attr-defined]  # Typer reads it
    run.__annotations__ = {each.name: each.annotation for each in flags}
    return run


def _flags(flags: Any) -> Iterator[Parameter]:
    panel, model = flags.__record__
    for each in fields(flags):
        more = {"rich_help_panel": panel} | each.metadata["more"]
        if model is not None:
            more = _declared(each.name, model.model_fields[each.name]) | more
        kind: Any = each.type
        kind = Annotated[kind, typer.Option(*each.metadata["names"], **more)]
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=kind)


def _declared(name: str, source: FieldInfo) -> dict[str, Any]:
    """Return the options of a flag that a model's field declares: help, default and choices."""
    kinds = (source.annotation, *get_args(source.annotation))
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    text, default = source.description or "", source.default
    if any(get_origin(kind) is tuple for kind in kinds):
        text = f"{text.removesuffix('.')}; repeatable."
    if default is True:
        default = "on"
    if default not in (None, (), {}) and default is not False:
        text += f"  [default: {default}]"
    return {"help": text, "metavar": "|".join(choices) or None}
