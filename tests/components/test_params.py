"""What a request may ask for, and how a mistake is explained: one sentence that says what to do."""

import json
import pickle
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import Field, field_validator

from diffray import SamplingParams
from diffray.components.caches.dual import Dual
from diffray.components.config import UNIONS, Config, InvalidField
from diffray.components.decoders.factor import Factor
from diffray.components.decoders.sequential import Sequential
from diffray.components.decoders.threshold import Threshold
from diffray.components.decoders.whole_slots import WholeSlots
from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from diffray.components.policy import DiffusionParams, Policy, accepted_by
from diffray.components.speculation import Verify
from tests.helpers.paths import GOLDEN
from tests.helpers.toy import toy_spec

MISSPELT = {"diffusion": {"decoder": {"kind": "threshold", "treshold": 0.9}}}
UNION = "allowed: 'threshold', 'fixed', 'hierarchy'"
MISTAKES: list[tuple[dict[str, Any], str, str]] = [  # the field, and what else is said
    ({"temperature": -1}, "temperature", "given: -1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"logit_bias": {3: 101}}, "logit_bias", "token 3: 101"),
    ({"stop": ""}, "stop", "an empty string"),
    ({"stop_token_ids": [1, "x"]}, "stop_token_ids", ""),
    ({"bad_words": ["a", ""]}, "bad_words", "one is empty; leave it out"),
    ({"bad_token_sequences": [[]]}, "bad_token_sequences", "one is empty; leave it out"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens", "must not exceed max_tokens (4)"),
    ({"logprobs": 5}, "logprobs", "top_logprobs=N (given: 5)"),
    ({"logprobs": 0}, "logprobs", "top_logprobs=N (given: 0)"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs=True"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
    # Options that there are not.
    ({"temprature": 1}, "temprature", "did you mean 'temperature'? Allowed: n,"),
    ({"temperature" * 10_000: 1}, "temperature" * 10_000, "allowed: n, max_tokens,"),
    ({"length_penalty": 1}, "length_penalty", "unknown option"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "send echo: true with logprobs"),
    ({"steps": 8}, "steps", '{"decoder": {"kind": "fixed", "steps": ...}}'),
    ({"max_new_tokens": 8}, "max_new_tokens", "write max_tokens"),
    ({"gen_length": 8}, "gen_length", "write max_tokens"),
    # In the policy.
    ({"diffusion": {"steps": 3}}, "diffusion.steps", 'write diffusion: {"decoder": '),
    ({"diffusion": {"colour": 3}}, "diffusion.colour", "allowed: block_length, iteration,"),
    ({"diffusion": {"block_length": 0}}, "diffusion.block_length", "given: 0"),
    ({"diffusion": {"iteration": "best"}}, "diffusion.iteration", "no kind 'best'; allowed: "),
    ({"diffusion": {"decoder": {"kind": "treshold"}}}, "diffusion.decoder", "mean 'threshold'?"),
    ({"diffusion": {"decoder": {"threshold": 0.9}}}, "diffusion.decoder", UNION),
    (MISSPELT, "diffusion.decoder.treshold", "mean 'threshold'? Allowed: kind, threshold, s"),
    ({"diffusion": {"cache": {"kind": "vicinity", "before": -1}}}, "diffusion.cache.before", "-1"),
]


@pytest.mark.parametrize(("given", "field", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**given)
    said = str(caught.value)
    assert caught.value.field == field and words in said
    assert field.rpartition(".")[2] in said
    assert "\n" not in said and "pydantic" not in said
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_a_configuration_in_another_explains_itself_once() -> None:
    with pytest.raises(ValueError, match=r"^threshold: .* \(given: 4\)$"):
        Threshold(threshold=4)
    with pytest.raises(ValueError, match=r"^decoder\.threshold: .* \(given: 4\)$"):
        DiffusionParams(decoder={"kind": "threshold", "threshold": 4})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^size: inner: .* \(given: 3\)$"):
        Outer(size=3)


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
    """And the defaults are among that."""
    spec = toy_spec(causal)
    accepted, policy = accepted_by(spec), Policy.resolve(DiffusionParams(), spec)
    defaults = ("block_diffusion", "exact") if causal else ("blockwise", "dual")
    assert (policy.iteration.kind, policy.cache.kind) == defaults
    for part in ("iteration", "cache"):
        kinds = DiffusionParams.model_json_schema()["properties"][part]["anyOf"][1]["enum"]
        fitting = []
        for kind in kinds:
            with suppress(ValueError):
                Policy.resolve(DiffusionParams(**{part: kind}), spec)
                fitting.append(kind)
        assert accepted[part] == fitting and 0 < len(fitting) < len(kinds)
    assert accepted["suffix"] == (not causal)


@pytest.mark.parametrize("name", ["ar_llama", "nemotron_labs_diffusion", "diffusion_gemma"])
def test_families_accept_the_iterations_and_caches_that_they_say(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    spec = choose_build(config)(config, Mesh(), torch.float32).spec
    for part, kinds in accepted_by(spec).items():
        if isinstance(kinds, list):
            every = DiffusionParams.model_json_schema()["properties"][part]["anyOf"][1]["enum"]
            for kind in every:
                pinned = {"canvas": "pinned"} if kind == "whole_slots" in kinds else {}
                params = DiffusionParams(**{part: kind} | pinned)
                if kind in kinds:
                    Policy.resolve(params, spec)
                else:
                    with pytest.raises(ValueError, match="decoder" if part == "decoder" else kind):
                        Policy.resolve(params, spec)


SERVER = {"block_length": 16, "decoder": {"kind": "credit"}, "cfg_scale": 1.5, "canvas": "fixed"}


def test_an_iteration_drops_the_servers_settings_that_it_cannot_use() -> None:
    """Those of an iteration that goes token by token, or of the other kind of attention."""
    draft = {"iteration": "self_speculation", "decoder": "sequential", "block_length": 4}

    def over(request: dict[str, Any], server: dict[str, Any]) -> DiffusionParams:
        return DiffusionParams(**request).over(DiffusionParams(**server))

    assert over({"iteration": "autoregressive"}, SERVER) == over(
        {"iteration": "autoregressive"}, {}
    )
    assert over({"iteration": "first_token"}, draft) == over({"iteration": "first_token"}, {})
    same = over({"iteration": {"kind": "self_speculation", "lora": "drafts"}}, draft)
    assert (same.block_length, same.decoder) == (4, Sequential())
    assert over({"iteration": "soft"}, SERVER).block_length == 16
    pieces = {"iteration": "block_diffusion", "cache": "exact"}
    assert over({"iteration": "blockwise"}, pieces).cache is None


def test_what_a_request_leaves_out_is_the_servers_then_the_models() -> None:
    credit = {"kind": "credit", "threshold": 0.9, "alpha": 0.5, "gamma": 0.2, "decay": 0.8}
    own = {"kind": "credit", "alpha": 0.5}
    spec = replace(toy_spec(True), block_length=4, decoder=own)
    policy = Policy.resolve(DiffusionParams(), spec)
    assert (policy.block_length, policy.options()["decoder"]) == (4, credit)
    assert Policy.resolve(DiffusionParams(block_length=8), spec).block_length == 8
    server = DiffusionParams(block_length=16, cfg_scale=1.5, decoder=Factor())
    policy = Policy.resolve(DiffusionParams().over(server), spec)
    assert (policy.block_length, policy.decoder) == (16, Factor())
    merged = DiffusionParams(block_length=8).over(server)
    assert (merged.block_length, merged.cfg_scale) == (8, 1.5)


def test_the_name_of_a_part_stands_for_it() -> None:
    named = DiffusionParams(speculation="verify", cache="dual")  # type: ignore[arg-type]
    assert named == DiffusionParams(speculation=Verify(), cache=Dual())


def test_a_default_decoder_of_pinned_canvases_is_for_those_alone() -> None:
    server = DiffusionParams(decoder=WholeSlots(threshold=0), block_length=8)
    merged = DiffusionParams().over(server)
    assert (merged.decoder, merged.block_length) == (None, 8)
    assert Policy.resolve(merged, toy_spec()).decoder == Threshold()
    assert DiffusionParams(canvas="pinned").over(server).decoder == WholeSlots(threshold=0)
    assert DiffusionParams(decoder=Factor()).over(server).decoder == Factor()
    on = server.model_copy(update={"canvas": "pinned"})
    assert DiffusionParams().over(on).decoder == WholeSlots(threshold=0)
    assert DiffusionParams(canvas="growing").over(on).decoder is None


def test_a_default_canvas_and_its_length_give_way_to_each_other() -> None:
    fixed: dict[str, Any] = {"canvas": "fixed"}
    longer: dict[str, Any] = {"canvas_length": 64}
    for given, default in ((fixed, longer), (longer, fixed)):
        params = DiffusionParams(**given).over(DiffusionParams(**default))
        policy = Policy.resolve(params, replace(toy_spec(), canvas_length=32))
        assert policy.canvas_length == given.get("canvas_length", 0)


def test_a_canvas_grows_unless_steps_are_counted_over_all_of_it() -> None:
    spec = replace(toy_spec(), canvas_length=32)
    every: list[dict[str, Any]] = [{}, {"decoder": "fixed"}]
    every.append({"decoder": "fixed", "canvas": "growing"})
    found = [Policy.resolve(DiffusionParams(**given), spec).canvas_length for given in every]
    assert found == [32, 0, 32]


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


def test_a_repr_has_what_differs_from_the_defaults_and_can_be_evaluated() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    given = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        stop="end",
        diffusion={"decoder": {"kind": "threshold", "threshold": 0.8}},
    )
    assert repr(given) == (
        "SamplingParams(max_tokens=8, stop=('end',), "
        "diffusion=DiffusionParams(decoder=Threshold(threshold=0.8)))"
    )
    names = {each.__name__: each for each in (SamplingParams, DiffusionParams, Threshold)}
    assert eval(repr(given), names) == given
