"""Flags that travel together are a frozen dataclass; `spread` makes each of its fields a flag.

So a flag is declared once, whichever commands take it, and a command hands it on with the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: a parameter that is a record gives way to its fields.

    A record that is the parameter's default says the defaults of the flags.
    """
    own = signature(command)
    hints = get_type_hints(command, include_extras=True)
    records = {name: hints[name] for name in own.parameters if is_dataclass(hints[name])}
    flags: list[Parameter] = []
    for name, parameter in own.parameters.items():
        if name in records:
            flags += _flags(records[name], parameter.default)
        else:
            flags.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def run(**typed: Any) -> None:
        for name, record in records.items():
            typed[name] = record(**{field.name: typed.pop(field.name) for field in fields(record)})
        command(**typed)

    run.__signature__ = own.replace(parameters=flags)  # type: ignore[attr-defined]  # Typer reads it
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def _flags(record: Any, preset: Any) -> Iterator[Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = _default(field) if preset is Parameter.empty else getattr(preset, field.name)
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


def _default(field: "Field[Any]") -> Any:
    return Parameter.empty if field.default is MISSING else field.default
