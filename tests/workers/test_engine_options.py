"""An engine option is declared once; what Python, ranks and editors see of it is the same."""

import inspect
import pickle
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import pytest
import torch

from diffray import DiffusionLLM
from diffray.cluster.control.engine_config import EngineConfig, RanksKeywords, RanksOptions
from diffray.components.config import Config
from diffray.components.dtypes import DTYPE_NAMES
from diffray.components.kv_pool import kv_format
from diffray.components.params import SamplingKeywords, SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.engine_options import EngineOptions

FIELDS = RanksOptions.model_fields


def kinds(annotation: Any) -> set[Any]:
    """Return the plain types among which an annotation chooses, a list for any sequence."""
    if get_origin(annotation) in (types.UnionType, Union):
        return {kind for part in get_args(annotation) for kind in kinds(part)}
    if get_origin(annotation) is Literal:
        return {str}
    origin = get_origin(annotation) or annotation
    if issubclass(origin, tuple) or origin is Sequence:
        return {list}
    return {dict if origin is Mapping else origin}


@pytest.mark.parametrize(
    ("keywords", "declared"), [(RanksKeywords, RanksOptions), (SamplingKeywords, SamplingParams)]
)
def test_editors_know_every_option_and_no_other(keywords: type, declared: type[Config]) -> None:
    known = get_type_hints(keywords, localns={"torch": torch})
    assert list(known) == list(declared.model_fields)
    for name, field in declared.model_fields.items():
        assert kinds(field.annotation) <= kinds(known[name]), name


def test_help_lists_every_option_with_its_default_and_meaning() -> None:
    parameters = inspect.signature(DiffusionLLM).parameters
    assert list(parameters) == ["model", "diffusion", *FIELDS]
    for name, field in FIELDS.items():
        assert parameters[name].default == field.default
        assert field.description and f"\n    {name}: {field.description}" in (
            DiffusionLLM.__doc__ or ""
        )


def test_a_rank_gets_all_of_its_options() -> None:
    given = {"device": "cpu", "dtype": "half", "max_num_seqs": 3, "eos_token_id": [1, 2]}
    config = EngineConfig(tensor_parallel_size=2, **given)
    assert pickle.loads(pickle.dumps(config.rank_options)) == EngineOptions(**given)


def test_values_may_be_torch_s_and_sizes_texts() -> None:
    options = EngineOptions(
        dtype=torch.bfloat16, device=torch.device("cpu"), kv_cache_memory="4GiB"
    )
    assert (options.dtype, options.device) == ("bfloat16", "cpu")
    assert options.kv_cache_memory == 4 << 30
    assert set(DTYPE_NAMES) | {"auto"} == set(get_args(FIELDS["dtype"].annotation))


@pytest.mark.parametrize("length", [8, 64])
def test_graphs_are_for_the_blocks_of_the_default_policy(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("diffray.cluster.control.llm.build_engine", build)
    with pytest.raises(InterruptedError):
        DiffusionLLM("demo", diffusion=DiffusionParams(block_length=length))
    with pytest.raises(InterruptedError):
        DiffusionLLM("demo", diffusion={"block_length": length}, graph_block_length=16)
    built = [call.args[1] for call in build.call_args_list]
    assert [options.graph_block_length for options in built] == [length, 16]


def test_a_default_policy_that_does_not_fit_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="the default does not fit: iteration 'autoregressive'"):
        DiffusionLLM("demo", diffusion={"iteration": "autoregressive"}, device="cpu")


def test_the_same_memory_holds_more_positions_of_few_bits() -> None:
    pages = {}
    for name in ("auto", "int8", "uint4"):
        with DiffusionLLM(
            "demo", dtype="float32", device="cpu", kv_cache_dtype=name, kv_cache_memory="4MiB"
        ) as llm:
            pages[name] = llm.limits.num_pages
            assert llm.engine.kv.nbytes <= (4 << 20) + llm.engine.kv.nbytes // pages[name]
    assert pages["int8"] / pages["auto"] == pytest.approx(32 / 9, rel=0.05)  # 128 to 36 bytes
    assert pages["uint4"] / pages["auto"] == pytest.approx(32 / 5, rel=0.05)  # 128 to 20 bytes


def test_memory_that_is_given_is_used_also_beyond_what_the_sequences_need() -> None:
    """It keeps prefixes."""
    pages = []
    for given in (None, "64MiB"):
        with DiffusionLLM("demo-llada2", max_num_seqs=1, kv_cache_memory=given) as llm:
            pages.append(llm.limits.num_pages)
            page = llm.engine.kv.nbytes / (pages[-1] + 1)
    assert pages[0] < pages[1] == (64 << 20) // page


def test_heads_that_do_not_fit_a_format_are_refused_in_one_sentence() -> None:
    message = (
        "kv_cache_dtype 'uint4' has a scale for each 32 numbers of a head, and this model's heads "
        "have 80; choose int8 or auto"
    )
    with pytest.raises(ValueError, match=message):
        kv_format("uint4", [(4, 64), (4, 80)])
    assert kv_format("int8", [(4, 80)]) is not None and kv_format("auto", [(4, 80)]) is None
