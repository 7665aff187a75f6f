"""Questions beside functions that an answer may call: one of them fits, or none does.

Functions are shown one to a line, as the chat template shows a request's `tools`; calls have the
format of the server. Values of arguments stand in the question.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from diffray.components.grammar.tool_calls import CLOSE, HEAD, OPEN
from examples.train_demo.arithmetic import one_operation
from examples.train_demo.json_extraction import compact, named_facts
from examples.train_demo.outside import outside
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import rewriting
from examples.train_demo.word_problems import word_problem
from examples.train_demo.words import Item, Source, Values, bank

# `calculators` have names and what they do; `errands` also parameters (a letter for the kind of
# value, and a name) and questions. `pairs` name two numbers, `savers` ask to save facts.
BANK = bank("tool_questions")
KINDS = {
    "c": "city", "n": "full_name", "x": "thing", "w": "word", "k": "2-99", "i": "2-999",
    "d": "day", "t": "text",
}  # fmt: skip


class Tool(NamedTuple):
    """A function: its name, the types of its parameters, and what it does."""

    name: str
    takes: dict[str, str]
    does: str


class Fit(NamedTuple):
    """A function, a question that asks for its call, the arguments, and a calculator's result."""

    tool: Tool
    question: str
    arguments: Values
    result: str = ""


def shown(tools: list[Tool]) -> str:
    """Return the functions as the chat template shows them."""
    lines = []
    for tool in tools:
        taken = ", ".join(f"{name}: {kind}" for name, kind in tool.takes.items())
        lines.append(f"{tool.name}({taken})" + (f": {tool.does}" if tool.does else ""))
    return "\n".join(lines)


def one_call(system: str) -> dict[str, Any]:
    """Return the constraint of a request that requires a call of the functions shown."""
    functions: dict[str, Any] = {}
    for name, taken in re.findall(r"^(\w+)\((.*?)\)", system, re.MULTILINE):
        takes = [word.split(": ") for word in taken.split(", ") if word]
        properties = {parameter: {"type": kind} for parameter, kind in takes}
        functions[name] = {
            "type": "object", "properties": properties, "required": list(properties),
        }  # fmt: skip
    return {"tool_calls": {"functions": functions, "several": False}}


def _calculator(s: Source, sign: str) -> Tool:
    calculator = BANK["calculators"][sign]
    name = s.invented() if s.chance(0.15) else s.rng.choice(calculator["names"])
    pair = s.rng.choice(BANK["pairs"]).split()
    if s.chance(0.1):
        pair = [s.invented(1), s.invented(2)]
    kind = s.rng.choice(["integer", "integer", "integer", "number"])
    return Tool(name, dict.fromkeys(pair, kind), s.phrase(calculator["does"]))


def _sum(s: Source) -> Fit:
    item = one_operation(s)
    a, sign, b, c = re.findall(r"\d+|[-+*/]", item.answer)
    tool = _calculator(s, sign)
    return Fit(tool, item.question, dict(zip(tool.takes, (int(a), int(b)), strict=True)), c)


def _filled(s: Source, name: str, parameters: str, does: str, asks: str | list[str]) -> Fit:
    """Return a tool whose parameters are letters and names, and a question with its values."""
    letters = {key: letter for letter, key in (p.split(" ") for p in parameters.split(";"))}
    arguments = s.values({key: KINDS[letter] for key, letter in letters.items()})
    ask = s.phrase(asks)
    places = list(arguments.values())
    if "{k}" in ask:
        places = list(letters)  # what is counted
    question = ask.format(*places, **dict(zip(letters.values(), arguments.values(), strict=True)))
    kinds = {k: "integer" if letter in "ki" else "string" for k, letter in letters.items()}
    return Fit(Tool(name, kinds, does), question, arguments)


def _errand(s: Source, asked: bool = True) -> Fit:
    """Return a fit; if not asked for, none that a question about the world may ask for."""
    errand = s.rng.choice(BANK["errands"][0 if asked else 6 :])
    parameters = s.rng.choice(errand["parameters"])
    name = s.invented() if s.chance(0.1) else s.rng.choice(errand["names"])
    does = s.phrase(errand["does"])
    tool, question, arguments, _ = _filled(s, name, parameters, does, errand["asks"])
    if s.chance(0.25):  # a schema may have any order
        arguments = dict(s.rng.sample(list(arguments.items()), len(arguments)))
    takes = {name: tool.takes[name] for name in arguments}
    return Fit(tool._replace(takes=takes), question, arguments)


def _invented(s: Source) -> Fit:
    """Return a fit whose verb and noun nobody has heard of: only the tool says that it fits."""
    verb, noun = s.invented(1), s.invented(1)
    s.drawn |= {verb, noun}
    name = s.rng.choice([f"{verb}_{noun}", f"{verb}_{noun}", verb, verb + noun.capitalize()])
    first = f"{s.rng.choice('nwckit')} {s.rng.choice([noun, noun, noun, 'name', 'value', 'id'])}"
    more = s.rng.choice(["", ";k count", ";n person", ";c city", f";w {s.invented(2)}", ";d day"])
    asks = f"{verb.capitalize()} the {noun} {{0}}.|{verb} {{0}}|{verb.capitalize()} {noun} {{0}}"
    if more:
        asks = (
            f"{verb.capitalize()} the {noun} {{0}} with {{1}}.|{verb} {{0}}, {{1}}|"
            f"{verb.capitalize()} {{0}} for {{1}}.|{verb} {noun} {{0}}, {{1}}"
        )
    does = s.phrase(f"{verb.capitalize()}s a {noun}.|{verb.capitalize()} the {noun}|Can {verb}.|")
    return _filled(s, name, first + more, does, asks)


def _saver(s: Source) -> Fit:
    """Return a tool for facts of a sentence."""
    values, sentence = named_facts(s)
    keys = s.rng.sample(list(values), min(3, s.rng.randint(1, len(values))))
    name = s.rng.choice("Person User UserInfo Record Entry extract save store_facts".split())
    name = s.invented().capitalize() if s.chance(0.4) else name
    does = s.phrase(
        f"Correctly extracted `{name}` with all the required parameters with correct types|"
        "Extracts the facts.|Saves a record.|What the text says|"
    )
    kinds = {key: "integer" if isinstance(values[key], int) else "string" for key in keys}
    question = s.phrase(BANK["savers"]).format(s=sentence)
    return Fit(Tool(name, kinds, does), question, {key: values[key] for key in keys})


def _among_others(s: Source, tools: list[Tool], signs: set[str]) -> list[Tool]:
    """Return the tools among up to three that do not fit, with calculators of `signs` at most."""
    mixed, drawn = list(tools), set(s.drawn)
    makers: list[Callable[[], Tool]] = [
        lambda: _errand(s, bool(tools)).tool, lambda: _invented(s).tool,
        lambda: _calculator(s, s.rng.choice(sorted(signs))),
    ]  # fmt: skip
    for _ in range(s.rng.choice([0, 0, 1, 1, 2, 3]) or (not tools)):
        other = s.rng.choice(makers)()
        if all(other.name != t.name and other.does != t.does for t in mixed):
            mixed.append(other)
    s.drawn = drawn
    s.rng.shuffle(mixed)
    return mixed


def _result(s: Source) -> str:
    k = s.rng.randint(1, 199)
    word, city = s.plain_word(), s.city()
    return s.rng.choice(
        [str(k), str(k), word, city, f"{word} and {k} degrees", f"{k} {word}", f"{k}:{k % 60:02}",
         f'{{"{word}": {k}}}', f"{word} {s.plain_word()}", s.full_name()]
    )  # fmt: skip


def tool_question(s: Source) -> Item:
    """Return a question with its functions: a call, an answer without any, or one after a call."""
    if s.chance(0.22):
        makers = (one_operation, word_problem, python_function, rewriting, outside)
        item = s.rng.choice(makers)(s)
        signs = {*"+-*/"} - ({*item.answer} if item.task == "arithmetic" else set())
        return item._replace(task="tool", system=shown(_among_others(s, [], signs)))
    make = s.rng.choices((_sum, _errand, _invented, _saver), (0.3, 0.4, 0.15, 0.15))[0]
    fit = make(s)
    arguments = fit.arguments
    if s.lower:
        arguments = {k: v.lower() if isinstance(v, str) else v for k, v in arguments.items()}
    call = f"{OPEN}{HEAD % fit.tool.name}{compact(arguments)}{CLOSE}"
    item = s.item("tool", fit.question, call)
    signs = {
        sign for sign, calculator in BANK["calculators"].items()
        if not fit.result or fit.tool.does not in calculator["does"]
    }  # fmt: skip
    item = item._replace(system=shown(_among_others(s, [fit.tool], signs)))
    if s.chance(0.8):
        return item
    result = fit.result or _result(s)
    return item._replace(
        question=result, answer=f"The result is {result}.", key=item.key + " / result",
        before=((item.question, call),), role="tool",
    )  # fmt: skip
