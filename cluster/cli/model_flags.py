"""Flags that are fields of a configuration model, which says their type, default and help.

A parameter `Annotated[Given, Fields(Model, ...)]` of a command becomes one flag per field; the
command gets the values that were typed, by the names of the fields.
"""

from collections.abc import Callable
from copy import copy
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer import Option

from diffray.cluster.cli.failures import one_sentence
from diffray.components.config import kinds

Given = dict[str, Any]


class Fields:
    """Some fields of a model; a `typer.Option` has what the model does not say, such as names."""

    def __init__(self, model: type[BaseModel], panel: str, *names: str, **options: Any) -> None:
        chosen = {name: Option() for name in names} | options
        fields = model.model_fields
        self.flags = [
            _flag(name, fields[name], panel, chosen[name])
            for name in sorted(chosen, key=[*fields].index)
        ]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: with a parameter for each field, and short errors."""
    own = signature(command)
    groups = {name: _flags(each.annotation) for name, each in own.parameters.items()}
    flags: list[Parameter] = []
    for name, parameter in own.parameters.items():
        flags += groups[name] or [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        for group, found in groups.items():
            values = {each.name: given.pop(each.name) for each in found}
            if values:
                given[group] = {name: value for name, value in values.items() if value is not None}
        with one_sentence():
            command(**given)

    run.__signature__ = own.replace(parameters=flags)  # type: ignore[attr-defined]  # Typer reads it
    run.__annotations__ = {each.name: each.annotation for each in flags}
    return run


def _flags(annotation: Any) -> list[Parameter]:
    parts = getattr(annotation, "__metadata__", ())  # of Annotated
    return [flag for part in parts if isinstance(part, Fields) for flag in part.flags]


def _flag(name: str, field: FieldInfo, panel: str, given: Any) -> Parameter:
    """Return a flag as Typer reads it; one that is not typed is None, not the default."""
    option, kind, allowed = copy(given), _kind(field.annotation), _allowed(field.annotation)
    text, default = field.description or "", "on" if field.default is True else field.default
    if get_origin(kind) is list and "repeatable" not in text:
        text = f"{text.removesuffix('.')}; repeatable."
    if allowed and option.metavar:
        text += f" One of: {', '.join(allowed)}."
    elif allowed:
        option.metavar = "|".join(allowed)
    if option.show_default and default not in (None, (), {}) and default is not False:
        text += f"  [default: {default}]"
    option.help = text
    option.rich_help_panel = option.rich_help_panel or panel
    option.autocompletion = lambda: allowed
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _kind(annotation: Any) -> Any:
    """Return the type of a flag's value; what has no simple type is a text, read by the model."""
    members = _members(annotation)
    for each in members:
        if get_origin(each) in (tuple, dict) and str not in members:
            return list[get_args(each)[0]]  # type: ignore[misc]  # as Typer reads a repeatable flag
    return next((each for each in (bool, int, float, Path) if each in members), str)


def _allowed(annotation: Any) -> list[str]:
    """Return the texts that a field allows: choices, or the kinds of a policy's part."""
    literals = (each for each in _members(annotation) if get_origin(each) is Literal)
    return kinds(annotation) or [choice for each in literals for choice in get_args(each)]
