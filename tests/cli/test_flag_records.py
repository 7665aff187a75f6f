"""Records of flags: each field is a flag of the command, and says what its model's field says."""

from typing import Any, get_args, get_type_hints

import pytest
from typer.main import get_command

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.cli import flags, main, serve_options
from diffray.cluster.cli.flag_records import names_of
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.deployment_options import Deployment
from diffray.components.config import Config
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

# A value of each type of a flag, and of those whose models take only some.
VALUES: dict[Any, Any] = {
    int: 8, bool: False, float: 1.5, str: "4GiB", list[int]: [8], list[str]: ["x"],
    "dtype": "float32", "kernels": "torch", "quantization": "experts_int8",
    "lora_modules": ["name=path"], "first_step_caching": "step0", "scheduling_policy": "fcfs",
    "kv_cache_dtype": "int8",
}  # fmt: skip
# How help shows a default, if not as it is.
SHOWN = {"True": "on"} | dict.fromkeys(("False", "None", "()", "{}"), "")


def options_of(*command: str) -> dict[str, Any]:
    found: Any = get_command(main.app)
    for name in command:
        found = found.commands[name]
    return {each.name: each for each in found.load().params}


@pytest.mark.parametrize(
    ("group", "model"),
    [
        (flags.Engine, EngineConfig),
        (serve_options.Layout, EngineConfig),
        (serve_options.Routing, Deployment),
        (serve_options.Listening, Server),
        (serve_options.Api, ApiSettings),
    ],
)
def test_flags_take_and_say_what_their_models_do(group: Any, model: type[Config]) -> None:
    """Their types are declared twice: a value of each flag is one that its model takes."""
    hints, found = get_type_hints(group), options_of("serve")
    for name in names_of(group):
        (kind, _) = get_args(hints[name])
        value = VALUES.get(name, VALUES[kind])
        others = {"tensor_parallel_size": 2} if name == "expert_parallel" else {}
        assert name in model(**{name: value}, **others).model_fields_set
        option, field = found[name], model.model_fields[name]
        assert option.rich_help_panel and option.default is None
        text, _, default = option.help.partition("  [default: ")
        assert text.removesuffix("; repeatable.") in str(field.description)
        shown = SHOWN.get(str(field.default), str(field.default))
        assert default.removesuffix("]") == shown
        assert option.multiple == ("repeatable" in text)


def test_flags_show_choices() -> None:
    assert options_of("serve")["kernels"].metavar == "auto|torch|triton"


def test_flags_of_a_request_agree_with_its_parameters() -> None:
    """Their models import torch, which help must not; so the two are compared."""
    found = options_of("generate")
    fields = SamplingParams.model_fields | DiffusionParams.model_fields
    common = {*found} & {*fields} - {"decoder", "cache", "iteration"}
    assert common == {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "block_length"}
    for name in common:
        assert found[name].help.removesuffix("; repeatable.") in str(fields[name].description)
        assert found[name].default is None
