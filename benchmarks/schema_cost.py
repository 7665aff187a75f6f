"""Measures what compiling a structured output takes, by the size of its schema or grammar.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.schema_cost /tmp/llada-100m

Seconds are CPU time. A checkpoint without a tokenizer gets one of 32,000 tokens.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.paired import head, row
from benchmarks.structured import add_tokenizer
from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.compile import compile_grammar, compile_regex, vocabulary_of
from diffray.components.grammar.structured import StructuredOutputs

FIELDS = 1, 5, 20, 50, 100
KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"enum": ["red", "green", "blue"]},
    {"type": "string", "maxLength": 20},
    {"type": "array", "items": {"type": "number"}},
]
SUMS = """
root ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= [0-9]+ | "(" root ")"
"""
JSON = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (member ("," member)*)? "}"
member ::= string ":" value
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
"""


def cases() -> Iterator[tuple[str, StructuredOutputs]]:
    """Yield the structured outputs to compile, with their names."""
    for count in FIELDS:
        properties = {f"field_{n}": KINDS[n % len(KINDS)] for n in range(count)}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        name = f"a schema of {count} fields, {len(json.dumps(schema))} bytes"
        yield name, StructuredOutputs(json=schema)
    yield "`json_object`", StructuredOutputs(json_object=True)
    yield "a grammar of sums", StructuredOutputs(grammar=SUMS)
    yield "a grammar of JSON", StructuredOutputs(grammar=JSON)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    checkpoint: Path = parser.parse_args().checkpoint
    if not (checkpoint / "tokenizer.json").exists():
        add_tokenizer(checkpoint, 32000)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vocabulary, size = vocabulary_of(tokenizer), len(tokenizer)
    ends = (tokenizer.eos_token_id,)
    print(head("", "seconds", "states", "edges", "classes of tokens", "KiB, kept", "depth"))
    for name, outputs in cases():
        begin = time.process_time()
        try:
            if outputs.grammar is None:
                found = compile_regex(outputs.pattern, vocabulary, ends, size)
            else:
                found = compile_grammar(outputs.grammar, vocabulary, ends, size)
        except InvalidField as error:
            print(row(name, f"{time.process_time() - begin:.2f}", str(error)))
            continue
        print(row(name, f"{time.process_time() - begin:.2f}", *measures(found)), flush=True)


def measures(automaton: Automaton) -> list[str]:
    live_S = np.asarray(automaton.member_SC.any(1))
    edges = int(live_S[automaton.set_QD].sum())
    sizes = len(automaton.set_QD), edges, automaton.num_classes, len(automaton.to_bytes()) // 1024
    return [f"{size:,}" for size in sizes] + [str(automaton.depth or "")]


if __name__ == "__main__":
    main()
