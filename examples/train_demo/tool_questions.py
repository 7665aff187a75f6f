"""Questions beside functions that an answer may call: one of them fits, or none does.

Functions are shown one to a line, as the chat template shows a request's `tools`; calls have the
format of the server. Values of arguments stand in the question.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from diffray.components.grammar.tool_calls import CLOSE, HEAD, OPEN
from examples.train_demo.arithmetic import one_operation
from examples.train_demo.json_extraction import WEEK, compact, named_facts
from examples.train_demo.outside import outside
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import rewriting
from examples.train_demo.word_problems import word_problem
from examples.train_demo.words import Item, Source

Values = dict[str, str | int]


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


CALCULATORS = {  # names; what they do
    "+": ("add|add|sum|plus|add_numbers|addition|calculate_sum",
          "Add two numbers.|Adds two integers.|Returns the sum of two numbers.|Computes a sum.|"
          "Add a and b.|Sums two values."),
    "-": ("subtract|subtract|minus|difference|subtract_numbers|subtraction",
          "Subtract two numbers.|Subtracts the second from the first.|Returns the difference.|"
          "Computes a difference.|Takes one number from another."),
    "*": ("multiply|multiply|times|product|multiply_numbers|multiplication",
          "Multiply two numbers.|Multiplies two integers.|Returns the product of two numbers.|"
          "Computes a product.|Multiplies two values."),
    "/": ("divide|divide|quotient|divide_numbers|division",
          "Divide two numbers.|Divides the first by the second.|Returns the quotient.|"
          "Computes a quotient.|Divides one number by another."),
}  # fmt: skip
PAIRS = "a b|a b|a b|x y|first second|left right|num1 num2|number1 number2|n m"
# Names; parameters, each a letter and its names; what it does; questions.
ERRANDS = [
    ("get_weather|get_weather|weather|current_weather|get_forecast",
     "c city|c city|c location|c place|c town",
     "Get the weather in a city.|Get the current weather.|Tells the weather at a place.|"
     "The weather in a given city",
     "What is the weather in {c}?|What's the weather like in {c}?|How is the weather in {c}?|"
     "Weather in {c}?|Is it raining in {c}?|Tell me the weather in {c}.|Will it be sunny in {c}?"),
    ("get_time|local_time|time_in", "c city|c location|c place|c zone",
     "Get the local time.|Tells the time in a city.|The time at a place",
     "What time is it in {c}?|Tell me the time in {c}.|How late is it in {c}?|"
     "What's the time in {c}?|Local time in {c}?"),
    ("search|web_search|search_web|find", "t query|t query|t text|t q",
     "Search the web.|Searches for a text.|Finds pages on the internet.",
     "Search for {t}.|Search the web for {t}.|Look up {t} on the web.|Find pages about {t}.|"
     "Look for {t} online."),
    ("translate|translate_word", "w text;w language|w word;w target",
     "Translates a text into a language.|Translate a word.",
     "Translate {0} into {1}.|What is {0} in {1}?|Say {0} in {1}.|How do you say {0} in {1}?"),
    ("send_message|send_email|write_to|message",
     "n to;w subject|n person;t text|n recipient;t body",
     "Send a message to a person.|Sends an email.|Writes to somebody.",
     "Send {0} a message: {1}|Tell {0}: {1}|Write to {0}: {1}|Message {0} that {1}|"
     "Send an email to {0} about {1}.|Send a message to {0} saying {1}."),
    ("set_timer|start_timer|timer", "k minutes|k minutes|k seconds|k hours",
     "Set a timer.|Starts a timer.|Begins to count down.",
     "Set a timer for {k} {0}.|Start a timer of {k} {0}.|Wake me in {k} {0}.|Timer: {k} {0}|"
     "I need a timer for {k} {0}."),
    ("play_song|play_music|play", "t title|w song|t name",
     "Play a song.|Plays music.|Starts a song.",
     "Play {0}.|Play the song {0}.|I want to hear {0}.|Put on {0}.|Can you play {0}?"),
    ("book_table|reserve_table|reserve", "n restaurant;k people|n place;k guests|n at;k seats",
     "Book a table.|Reserves a table in a restaurant.",
     "Book a table for {1} at {0}.|Reserve a table for {1} people at {0}.|"
     "I need a table for {1} at {0}.|A table at {0} for {1}, please.|We are {1}, book {0}."),
    ("order|order_item|place_order|buy", "x item;k quantity|x product;k count|x goods;k amount",
     "Order things.|Orders goods from the shop.|Buys an item.",
     "Order {1} {0}.|Buy {1} {0}.|I want {1} {0}.|Please order {1} {0} for me.|"
     "Get me {1} {0}.|We need {1} {0}, order them."),
    ("find_train|search_flights|book_trip|route",
     "c origin;c destination|c from;c to|c start;c end",
     "Find a train.|Finds a way between two cities.|Searches for flights.",
     "Find a train from {0} to {1}.|Is there a flight from {0} to {1}?|"
     "How do I get from {0} to {1}?|I want to go from {0} to {1}.|Trains to {1} from {0}?|"
     "Book a trip from {0} to {1}."),
    ("get_customer|lookup_user|find_order|get_invoice", "i id|i number|i customer_id|i order_id",
     "Looks up a record by its number.|Get the entry with an id.|Finds a customer.",
     "Look up customer {i}.|Show me order {i}.|Find number {i}.|Who is customer {i}?|"
     "Get the record {i}.|What is in entry {i}?|Open invoice {i}."),
    ("remind|set_reminder|add_reminder", "n person;k hour|t text;k hour|w what;d day",
     "Sets a reminder.|Reminds a person.",
     "Remind me: {0}, {1}|Reminder for {0} at {1}.|Set a reminder for {0}: {1}|"
     "Please remind {0} at {1}."),
    ("add_event|create_event|schedule", "w title;d day|t event;d date|n with;d day",
     "Adds an event to the calendar.|Schedules a meeting.",
     "Put {0} into my calendar on {1}.|Add {0} on {1}.|On {1} I have {0}, note it.|"
     "Schedule {0} for {1}.|Plan {0} for {1}."),
    ("get_price|stock_price|price_of", "w item|n company|x product|w symbol",
     "Get a price.|Tells what something costs.|The current price",
     "What does {0} cost?|How much is {0}?|What is the price of {0}?|Price of {0}?|"
     "Tell me the price of {0}."),
    ("call_person|call|phone", "n name|n person|n contact", "Calls a person.|Phones somebody.",
     "Call {0}.|Phone {0}, please.|Give {0} a call.|I want to talk to {0}."),
    ("turn_on|switch_on|set_light", "w device|w room|w lamp",
     "Turns something on.|Switches a light.",
     "Turn on the {0}.|Switch on the {0}.|Turn the {0} on.|I want the {0} on."),
]  # fmt: skip
SAVERS = (
    "Extract: {s}|Extract the data: {s}|{s}|{s}|{s}|Save this: {s}|{s} Extract this.|"
    "Note this: {s}|{s} Save it.|Here is a text: {s}|Read this: {s}|Extract the facts. {s}|"
    "Extract the user: {s}|Store {s}|Extract from this text: {s}"
)


def shown(tools: list[Tool]) -> str:
    """Return the functions as the chat template shows them."""
    lines = []
    for tool in tools:
        taken = ", ".join(f"{name}: {kind}" for name, kind in tool.takes.items())
        lines.append(f"{tool.name}({taken})" + (f": {tool.does}" if tool.does else ""))
    return "\n".join(lines)


def called(name: str, arguments: Values) -> str:
    return f"{OPEN}{HEAD % name}{compact(arguments)}{CLOSE}"


def _calculator(s: Source, sign: str) -> Tool:
    names, does = CALCULATORS[sign]
    name = s.invented() if s.chance(0.15) else s.rng.choice(names.split("|"))
    pair = s.rng.choice(PAIRS.split("|")).split()
    if s.chance(0.1):
        pair = [s.invented(1), s.invented(2)]
    kind = s.rng.choice(["integer", "integer", "integer", "number"])
    return Tool(name, dict.fromkeys(pair, kind), s.phrase(does))


def _sum(s: Source) -> Fit:
    item = one_operation(s)
    a, sign, b, c = re.findall(r"\d+|[-+*/]", item.answer)
    tool = _calculator(s, sign)
    return Fit(tool, item.question, dict(zip(tool.takes, (int(a), int(b)), strict=True)), c)


def _value(s: Source, letter: str) -> str | int:
    makers: dict[str, Callable[[], str | int]] = {
        "c": s.city, "n": s.full_name, "x": s.thing, "w": s.plain_word,
        "k": lambda: s.rng.randint(2, 99), "i": lambda: s.rng.randint(2, 999),
        "d": lambda: s.rng.choice(WEEK),
        "t": lambda: " ".join(s.plain_word() for _ in range(s.rng.choice([1, 2, 2, 3]))),
    }  # fmt: skip
    return makers[letter]()


def _filled(s: Source, name: str, parameters: str, does: str, asks: str) -> Fit:
    """Return a tool whose parameters are letters and names, and a question with its values."""
    letters = dict(reversed(p.split(" ")) for p in parameters.split(";"))
    arguments = {key: _value(s, letter) for key, letter in letters.items()}
    ask = s.phrase(asks)
    places = list(arguments.values())
    if "{k}" in ask:
        places = list(letters)  # what is counted
    question = ask.format(*places, **dict(zip(letters.values(), arguments.values(), strict=True)))
    kinds = {k: "integer" if letter in "ki" else "string" for k, letter in letters.items()}
    return Fit(Tool(name, kinds, does), question, arguments)


def _errand(s: Source, asked: bool = True) -> Fit:
    """Return a fit; if not asked for, none that a question about the world may ask for."""
    names, parameters, does, asks = s.rng.choice(ERRANDS if asked else ERRANDS[6:])
    one = s.rng.choice(parameters.split("|"))
    name = s.invented() if s.chance(0.1) else s.rng.choice(names.split("|"))
    tool, question, arguments, _ = _filled(s, name, one, s.phrase(does), asks)
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
    question = s.phrase(SAVERS).format(s=sentence)
    return Fit(Tool(name, kinds, does), question, {key: values[key] for key in keys})


def _among_others(s: Source, tools: list[Tool], signs: set[str]) -> list[Tool]:
    """Return the tools among up to three that do not fit, with calculators of `signs` at most."""
    mixed, drawn = list(tools), set(s.drawn)
    for _ in range(s.rng.choice([0, 0, 1, 1, 2, 3]) or (not tools)):
        other = s.rng.choice([
            lambda: _errand(s, bool(tools)).tool, lambda: _invented(s).tool,
            lambda: _calculator(s, s.rng.choice(sorted(signs))),
        ])()  # fmt: skip
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
        signs = {*CALCULATORS} - ({*item.answer} if item.task == "arithmetic" else set())
        return item._replace(task="tool", system=shown(_among_others(s, [], signs)))
    make = s.rng.choices((_sum, _errand, _invented, _saver), (0.3, 0.4, 0.15, 0.15))[0]
    fit = make(s)
    arguments = fit.arguments
    if s.lower:
        arguments = {k: v.lower() if isinstance(v, str) else v for k, v in arguments.items()}
    call = called(fit.tool.name, arguments)
    item = s.item("tool", fit.question, call)
    signs = {sign for sign, (_, does) in CALCULATORS.items() if fit.tool.does not in does}
    item = item._replace(system=shown(_among_others(s, [fit.tool], signs or {*CALCULATORS})))
    if s.chance(0.8):
        return item
    result = fit.result or _result(s)
    return item._replace(
        question=result, answer=f"The result is {result}.", key=item.key + " / result",
        before=((item.question, call),), role="tool",
    )  # fmt: skip
