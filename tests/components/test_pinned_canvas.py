"""Schemas as literals and slots: every filling is valid, and the demo models' fields are right."""

import itertools
import json
import random
import string
from contextlib import suppress
from statistics import fmean
from typing import Any

import jsonschema
import pytest

from benchmarks.records import Marks, marks, questions, schema_of
from diffray import DiffusionLLM, SamplingParams
from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import of_texts
from diffray.components.grammar.compile import Grammars, compile_regex
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.grammar.template import Template, lay_out, spell
from tests.helpers.random_grammars import random_ids
from tests.helpers.random_schemas import random_schema

# A token for each letter, and some of several that no slot's value may reach over.
TEXTS = [bytes([code]) for code in range(32, 127)] + ["\u00e9".encode(), b'": "', b'","', b'"}']
END = len(TEXTS)
VOCABULARY = {text: [token] for token, text in enumerate(TEXTS)}


def canvas_of(slot_length: int = 8, **given: Any) -> Template:
    return lay_out(
        StructuredOutputs(**given).parts,
        slot_length,
        END,
        lambda text: spell(text, [], VOCABULARY, {}),
        lambda field, options: (
            of_texts(options, (END,), END + 1)
            if field.choice
            else compile_regex(field.regex, VOCABULARY, (END,), END + 1)
        ),
    )


def test_options_are_written_in_their_own_tokens_alone() -> None:
    options = (1, 2), (1, 2, 3), (1,), (4, 3), (2, 2)  # of tokens 0 to 4; 5 ends
    automaton = of_texts(options, (5,), 6)
    accepted = set()
    for length in range(1, 4):
        for ids in itertools.product(range(5), repeat=length):
            with suppress(ValueError):  # a token that is not allowed
                if int(automaton.distance_Q[automaton.follow(0, ids)]) == 1:
                    accepted.add(ids)
    assert accepted == {*options} and automaton.shortest == 2


def test_too_many_options_are_refused_before_a_table_is_filled() -> None:
    """Each state has room for as many edges as the first, and a step looks at all of them."""
    draw = random.Random(3)
    texts = tuple("".join(draw.choices(string.ascii_letters, k=20)) for _ in range(1000))
    ids = {text: token for token, text in enumerate(TEXTS)}
    grammars = Grammars(VOCABULARY, (END,), END + 1, lambda text: [ids[c.encode()] for c in text])
    assert grammars.compile(StructuredOutputs(choice=texts[:50]), 8)
    with pytest.raises(InvalidField, match="too large an automaton"):
        grammars.compile(StructuredOutputs(choice=texts), 8)


def random_filling(canvas: Template, draw: random.Random) -> str:
    text, numbers = b"", set()
    for cell in canvas.cells[:-1]:
        number = -1 - cell
        if cell >= 0:
            text += TEXTS[cell]
        elif number not in numbers:
            numbers.add(number)
            automaton, room = canvas.slots[number].automaton, canvas.cells.count(cell)
            text += b"".join(TEXTS[token] for token in random_ids(automaton, draw, room + 1))
    return text.decode()


def test_every_filling_of_a_schema_s_canvas_is_valid() -> None:
    draw, made = random.Random(1), 0
    for _ in range(150):
        schema = random_schema(draw) | {"$defs": {"T": random_schema(draw, 0)}}
        try:
            canvas = canvas_of(draw.choice((1, 4, 12)), json=schema)
        except InvalidField as error:
            assert "one answer only" in str(error)
            continue
        made += 1
        check = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for _ in range(3):
            check.validate(json.loads(random_filling(canvas, draw)))
    assert made > 100


def test_literals_are_pinned_and_fields_have_the_room_they_need() -> None:
    address = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo", "Bergen"]}}}
    schema = {
        "type": "object",
        "properties": {
            "kind": {"const": "person"},
            "age": {"type": "integer", "minimum": 5, "maximum": 120},
            "at": {"$ref": "#/$defs/A"},
            "day": {"type": "string", "format": "date"},
            "name": {"type": "string"},
            "married": {"type": "boolean"},
        },
        "$defs": {"A": address},
    }
    canvas = canvas_of(4, json=schema)
    laid = "".join(TEXTS[cell].decode() if cell >= 0 else "_" for cell in canvas.cells[:-1])
    assert laid == (
        '{"kind":"person","age":___,"at":{"city":"______"},"day":"__________","name":"____",'
        '"married":_____}'
    )
    assert [slot.path for slot in canvas.slots] == ["age", "at.city", "day", "name", "married"]
    assert [slot.options for slot in canvas.slots] == [
        (), ("Rome", "Oslo", "Bergen"), (), (), ("true", "false")
    ]  # fmt: skip
    assert canvas.slots[1].following == VOCABULARY[b'"}'][0]
    assert canvas_of(choice=["yes", "no"]).cells == (-1, -1, -1, END)
    long = {"type": "array", "items": {"type": "boolean"}, "minItems": 3}
    assert canvas_of(4, json=long).cells == (-1,) * len("[true,true,true]") + (END,)


def test_a_schema_that_needs_itself_ends() -> None:
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}}
    assert len(canvas_of(json=node).slots) == 4
    with pytest.raises(InvalidField, match="needs itself"):
        canvas_of(json=node | {"required": ["next"]})


@pytest.mark.long
@pytest.mark.rotate(1)
@pytest.mark.parametrize("model", ["demo", "demo-llada2"])
def test_pinned_fields_are_nearly_as_right_as_free_ones_in_fewer_forwards(model: str) -> None:
    """Of words that the demo models have never seen, they copy some wrong either way."""
    items = questions(200, seed=4321)
    schemas = [{"json": schema_of(item)} for item in items]
    chats = [[{"role": "user", "content": item.question}] for item in items]
    with DiffusionLLM(model, device="cpu", dtype="float32", max_num_seqs=16) as llm:

        def asked(params: list[SamplingParams]) -> tuple[Marks, list[int]]:
            outputs = llm.chat(chats, params, use_tqdm=False)
            texts = [output.outputs[0].text for output in outputs]
            return marks(items, texts), [output.forwards for output in outputs]

        free, free_forwards = asked([SamplingParams(max_tokens=128)] * len(items))
        canvas: dict[str, Any] = {"max_tokens": 128, "diffusion": {"canvas": "pinned"}}
        pinned, forwards = asked([SamplingParams(structured_outputs=s, **canvas) for s in schemas])
        assert pinned.right >= free.right - 0.06 and pinned.valid == 1
        assert fmean(forwards) < min(fmean(free_forwards), 3)
        assert max(forwards) <= 2 or model == "demo-llada2"  # whose canvas has blocks


def test_many_records_share_an_instruction() -> None:
    """What they begin with is stored once where attention is block-causal."""
    records = [f"Tom, {age}, is a {job} from Rome." for age, job in ((31, "nurse"), (67, "pilot"))]
    schema = {
        "type": "object",
        "properties": {
            "job": {"enum": ["nurse", "pilot", "driver"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
    }
    long = "Answer with nothing but JSON. " * 12 + "Give job and age as JSON:"
    for model in ("demo", "demo-llada2"):
        with DiffusionLLM(model, device="cpu", dtype="float32") as llm:
            found = llm.decide(records, {"json": schema}, "Give job and age as JSON:")
            answers = [json.loads(output.outputs[0].text) for output in found]
            assert answers == [{"job": "nurse", "age": 31}, {"job": "pilot", "age": 67}]
            for output, job in zip(found, ("nurse", "pilot"), strict=True):
                fields = output.outputs[0].fields
                assert fields is not None
                assert fields["job"].options[job] == fields["job"].probability > 0.5
            shared = [each.cached_tokens for each in llm.decide(records, {"json": schema}, long)]
            assert (max(shared) >= 64) == (model == "demo-llada2")
