"""What a request may ask for, and how a mistake is explained: one sentence that says what to do."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import Field, field_validator

from diffray import SamplingParams
from diffray.components.config import UNIONS, Config, InvalidField, counted
from diffray.components.decoders.factor import Factor
from diffray.components.decoders.threshold import Threshold
from diffray.components.decoders.whole_slots import WholeSlots
from diffray.components.policy import DiffusionParams, Policy, accepted_by
from tests.helpers.toy import toy_spec


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, r"^temperature: .*greater than or equal to 0 \(given: -1\)$"),
        ({"top_p": 0}, r"^top_p: .*greater than 0 \(given: 0\)$"),
        ({"max_tokens": 0}, r"^max_tokens: .*greater than or equal to 1"),
        (
            {"temprature": 1},
            r"^unknown option 'temprature', did you mean 'temperature'\? Allowed: n,",
        ),
        ({"length_penalty": 1}, r"^unknown option 'length_penalty'"),
        (
            {"presence_penalty": 2.5},
            r"^presence_penalty: .*less than or equal to 2 \(",
        ),
        ({"frequency_penalty": -3}, r"^frequency_penalty: .*greater than or equal to -2"),
        ({"repetition_penalty": 0}, r"^repetition_penalty: .*greater than or equal to 0.01"),
        ({"min_p": 1.5}, r"^min_p: .*less than or equal to 1"),
        ({"bad_words": ["a", ""]}, r"^bad_words: one is empty; leave it out$"),
        ({"bad_token_sequences": [[]]}, r"^bad_token_sequences: one is empty; leave it out$"),
        ({"prompt_logprobs": 0}, r"^unknown option 'prompt_logprobs'; leave it out: a diffusion"),
        (
            {"steps": 8},
            r"^unknown option 'steps'; write diffusion: "
            r'\{"decoder": \{"kind": "fixed", "steps": ...\}\}$',
        ),
        ({"max_new_tokens": 8}, r"^unknown option 'max_new_tokens'; write max_tokens$"),
        ({"gen_length": 8}, r"^unknown option 'gen_length'; write max_tokens$"),
        ({"temperature" * 10_000: 1}, r"^unknown option '(temperature)+'; allowed: n, max_tokens,"),
        (
            {"min_tokens": 9, "max_tokens": 4},
            r"^min_tokens \(9\) must not exceed max_tokens \(4\)$",
        ),
        ({"stop": ""}, r"^stop: an empty string"),
        ({"logit_bias": {3: 101}}, r"^logit_bias: token 3: 101.* is not allowed"),
        ({"seed": 2**63}, r"^seed: "),
        (
            {"diffusion": {"decoder": {"kind": "treshold"}}},
            r"^diffusion.decoder: no kind 'treshold', did you mean 'threshold'\? "
            r"Allowed: 'threshold', 'fixed', 'hierarchy'",
        ),
        (
            {"diffusion": {"decoder": {"kind": "threshold", "treshold": 0.9}}},
            r"^diffusion.decoder: unknown option 'treshold', did you mean 'threshold'\? "
            r"Allowed: kind, threshold, steps_per_block$",
        ),
        (
            {"diffusion": {"decoder": {"threshold": 0.9}}},
            r"^diffusion.decoder: a 'kind' is needed; allowed: 'threshold', 'fixed', 'hierarchy'",
        ),
        (
            {"diffusion": {"iteration": "best"}},
            r"^diffusion.iteration: no kind 'best'; allowed: 'blockwise', 'first_token', ",
        ),
        ({"logprobs": 5}, r"^logprobs: write True or False; .*top_logprobs=N \(given: 5\)$"),
        ({"logprobs": 0}, r"^logprobs: write True or False; .*top_logprobs=N \(given: 0\)$"),
        ({"diffusion": {"cache": {"kind": "vicinity", "before": -1}}}, r"given: -1"),
        (
            {"diffusion": {"steps": 3}},
            r"^diffusion: unknown option 'steps'; write diffusion: \{\"decoder\": ",
        ),
        (
            {"diffusion": {"colour": 3}},
            r"^diffusion: unknown option 'colour'; allowed: block_length, iteration, decoder,",
        ),
        ({"diffusion": {"block_length": 0}}, r"^diffusion.block_length: .*\(given: 0\)$"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**given)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Threshold(limit=4),  # type: ignore[call-arg]
            "unknown option 'limit'; allowed: kind, threshold, steps_per_block",
        ),
        (
            lambda: Threshold(threshold=4),
            "threshold: Input should be less than or equal to 1 (given: 4)",
        ),
        (
            lambda: DiffusionParams(cache="paged"),  # type: ignore[arg-type]
            "cache: no kind 'paged'; allowed: 'none', 'prefix', 'dual', 'vicinity', 'exact', "
            "'sub_block'",
        ),
        (
            lambda: DiffusionParams(decoder={"kind": "threshold", "threshold": 4}),  # type: ignore[arg-type]
            "decoder.threshold: Input should be less than or equal to 1 (given: 4)",
        ),
        (
            lambda: SamplingParams(diffusion={"decoder": {"kind": "threshold", "threshold": 4}}),
            "diffusion.decoder.threshold: Input should be less than or equal to 1 (given: 4)",
        ),
        (lambda: Outer(size=3), "size: inner: Input should be less than or equal to 2 (given: 3)"),
    ],
)
def test_every_configuration_explains_itself_once(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids"),
        ({"diffusion": {"steps": 3}}, "diffusion.steps"),
        ({"diffusion": {"decoder": {"kind": "x"}}}, "diffusion.decoder"),
        (
            {"diffusion": {"decoder": {"kind": "edit", "threshold": 7}}},
            "diffusion.decoder.threshold",
        ),
    ],
)
def test_a_mistake_carries_the_name_of_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_the_name_of_a_kind_stands_for_the_kind_with_its_defaults() -> None:
    names = {"decoder": "credit", "cache": "none", "iteration": "soft"}
    spelt_out = {name: {"kind": kind} for name, kind in names.items()}
    assert SamplingParams(diffusion=names) == SamplingParams(diffusion=spelt_out)


def test_every_field_with_several_kinds_is_known_to_messages() -> None:
    fields = DiffusionParams.model_fields
    assert tuple(n for n, field in fields.items() if "kind" in str(field)) == UNIONS


class Inner(Config):
    inner: int = Field(0, le=2)


class Outer(Config):
    size: int = 0

    @field_validator("size")
    @classmethod
    def _fits_inside(cls, size: int) -> int:
        return Inner(inner=size).inner


@pytest.mark.parametrize("causal", [False, True])
def test_what_a_model_is_said_to_accept_is_what_it_accepts(causal: bool) -> None:
    spec = toy_spec(causal)
    accepted = accepted_by(spec)
    for part in ("iteration", "cache"):
        kinds = DiffusionParams.model_json_schema()["properties"][part]["anyOf"][1]["enum"]
        fitting = []
        for kind in kinds:
            with suppress(ValueError):
                Policy.resolve(DiffusionParams(**{part: kind}), spec)
                fitting.append(kind)
        assert accepted[part] == fitting and 0 < len(fitting) < len(kinds)
    assert accepted["suffix"] == (not causal)


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(number, "forward") for number in (0, 1, 2)] == [
        "0 forwards",
        "1 forward",
        "2 forwards",
    ]


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_what_a_request_leaves_out_comes_from_the_server() -> None:
    server = DiffusionParams(block_length=16, cfg_scale=1.5)
    merged = DiffusionParams(block_length=8).over(server)
    assert (merged.block_length, merged.cfg_scale) == (8, 1.5)


def test_a_default_decoder_of_pinned_canvases_is_for_those_alone() -> None:
    server = DiffusionParams(decoder=WholeSlots(threshold=0), block_length=8)
    merged = DiffusionParams().over(server)
    assert (merged.decoder, merged.block_length) == (None, 8)
    assert Policy.resolve(merged, toy_spec()).decoder == Threshold()
    assert DiffusionParams(canvas="pinned").over(server).decoder == WholeSlots(threshold=0)
    assert DiffusionParams(decoder=Factor()).over(server).decoder == Factor()
    on = server.model_copy(update={"canvas": "pinned"})
    assert DiffusionParams().over(on).decoder == WholeSlots(threshold=0)
    assert DiffusionParams(canvas="free").over(on).decoder is None


@pytest.mark.parametrize(
    ("causal", "iteration", "cache"),
    [(False, "blockwise", "dual"), (True, "block_diffusion", "exact")],
)
def test_defaults_fit_the_model(causal: bool, iteration: str, cache: str) -> None:
    policy = Policy.resolve(DiffusionParams(), toy_spec(causal))
    assert policy.iteration.kind == iteration
    assert policy.cache.kind == cache


def test_a_request_that_names_no_block_length_takes_the_models_own() -> None:
    spec = replace(toy_spec(True), block_length=4)
    assert Policy.resolve(DiffusionParams(), spec).block_length == 4
    assert Policy.resolve(DiffusionParams(block_length=8), spec).block_length == 8
    server = DiffusionParams(block_length=16)
    assert Policy.resolve(DiffusionParams().over(server), spec).block_length == 16


def test_a_request_that_names_no_decoder_takes_the_models_own() -> None:
    spec = replace(toy_spec(True), decoder={"kind": "credit", "alpha": 0.5})
    assert Policy.resolve(DiffusionParams(), spec).options()["decoder"] == {
        "kind": "credit", "threshold": 0.9, "alpha": 0.5, "gamma": 0.2, "decay": 0.8,
    }  # fmt: skip
    server = DiffusionParams(decoder=Factor())
    assert Policy.resolve(DiffusionParams().over(server), spec).decoder == Factor()


def test_a_decoder_that_remembers_takes_no_endless_block() -> None:
    """What one request may cost is bounded: credit grows with the square of the block."""
    params = DiffusionParams(decoder={"kind": "credit"}, block_length=512)  # type: ignore[arg-type]
    assert Policy.resolve(params, toy_spec()).block_length == 512
    longer = params.model_copy(update={"block_length": 513})
    told = "block_length is 513, and decoder 'credit' takes blocks of at most 512"
    with pytest.raises(ValueError, match=told):
        Policy.resolve(longer, toy_spec())
    plain = DiffusionParams(block_length=513)
    assert Policy.resolve(plain, toy_spec()).block_length == 513


def test_rankings_need_logprobs() -> None:
    with pytest.raises(ValueError, match=r"^top_logprobs needs logprobs=True$"):
        SamplingParams(top_logprobs=3)
    with pytest.raises(ValueError, match=r"^top_logprobs: .*less than or equal to 20"):
        SamplingParams(top_logprobs=21, logprobs=True)


def test_a_repr_has_what_differs_from_the_defaults_and_can_be_evaluated() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    given = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        diffusion={"decoder": {"kind": "threshold", "threshold": 0.8}},
    )
    assert repr(given) == (
        "SamplingParams(max_tokens=8, diffusion=DiffusionParams(decoder=Threshold(threshold=0.8)))"
    )
    names = {each.__name__: each for each in (SamplingParams, DiffusionParams, Threshold)}
    assert eval(repr(given), names) == given
