"""Facts in a sentence, asked for as JSON: the values are copied, the keys given."""

import json
from typing import NamedTuple

from examples.train_demo.words import Item, Source

EVENTS = (
    "meeting concert lecture party workshop race dinner market festival exam class show game trial "
    "wedding picnic parade course interview rehearsal"
).split()
WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLORS = "red blue green black white yellow brown gray purple orange pink silver".split()
ANIMALS = "dog cat horse rabbit parrot hamster goat pony duck turtle snake goose".split()
NAMES = {  # what a key may be called
    "name": "name|name|name|person|who|full_name|first_name",
    "age": "age|age|age|years|years_old",
    "city": "city|city|city|town|place|location|home|lives_in|where",
    "job": "job|job|job|profession|work|occupation|role",
    "customer": "customer|customer|name|client|buyer|who|person",
    "item": "item|item|product|thing|what|goods|article",
    "quantity": "quantity|quantity|amount|count|number|how_many",
    "price": "price|price|cost|total|dollars|paid|money",
    "event": "event|event|title|what|kind|type",
    "place": "place|place|city|location|where|town",
    "day": "day|day|date|weekday|when",
    "hour": "hour|hour|time|start|at",
    "guests": "guests|guests|people|visitors|size|attendance",
    "owner": "owner|owner|name|who|person",
    "animal": "animal|animal|kind|pet|type",
    "pet_name": "pet_name|pet_name|pet|called|animal_name",
    "color": "color|color|colour|paint",
    "from": "from|from|start|origin|departure",
    "to": "to|to|end|destination|arrival",
}


class Facts(NamedTuple):
    values: dict[str, str | int]
    sentence: str


def _a(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _person(s: Source) -> Facts:
    full = s.full_name()
    f: dict[str, str | int] = {
        "name": full,
        "age": s.rng.randint(2, 99),
        "city": s.city(),
        "job": s.job(),
    }
    kinds = {
        "name age city job": "{name} is {age} years old, lives in {city} and works as {a} {job}.|"
        "{name}, {age}, is {a} {job} from {city}.|"
        "In {city} lives {name}, {a} {job} who is {age} years old.|"
        "At the age of {age}, {name} moved to {city} to work as {a} {job}.|"
        "My name is {name}, I am {age} and I work as {a} {job} in {city}.|"
        "{name} is {a} {age} year old {job} from {city}.|"
        "I am {name} from {city}, {age} years old, {job}.|"
        "{name} ({age}) works in {city} as {a} {job}.|"
        "The {job} {name}, {age}, lives in {city}.|"
        "Meet {name}: {age} years old, {a} {job}, living in {city}.|"
        "{name}, who is {age}, comes from {city} and is {a} {job}.|"
        "{name} from {city} is {age} years old and {a} {job} by profession.|"
        "I know {name}, {a} {job} of {age} years who lives in {city}.|"
        "Name {name}, age {age}, city {city}, job {job}.|"
        "Our new {job} is {name}, {age} years old, from {city}.|"
        "This is {name}, {age}. Home: {city}. Work: {job}.|"
        "{name} is {a} {job}, lives in {city} and is {age} years old.",
        "name age city": "{name} is {age} years old and lives in {city}.|"
        "{name}, {age}, lives in {city}.|{name} from {city} is {age}.|"
        "My name is {name}, I am {age} and I live in {city}.|"
        "{age} year old {name} comes from {city}.|"
        "{name} was born in {city} {age} years ago.|"
        "I am {name}, {age}, from {city}.|{name} ({age}, {city}).|"
        "{name} is {age} and is from {city}.|"
        "This is {name}, {age} years old, from {city}.|In {city} I met {name}, who is {age}.|"
        "{name} lives in {city} and is {age}.|{name}, {age} years old, is at home in {city}.",
        "name city": "{name} lives in {city}.|{name} comes from {city}.|"
        "{name} moved to {city}.|I am {name} and I live in {city}.|"
        "{city} is the home of {name}.|{name} is from {city}.|"
        "{name} is at home in {city}.|You will find {name} in {city}.|{name} was born in {city}.|"
        "My friend {name} lives in {city}.",
        "name age": "{name} is {age} years old.|{name} is {age}.|"
        "My name is {name} and I am {age}.|{name} turned {age} today.|"
        "{name}, aged {age}.|"
        "{name} will be {age} next week.|I am {name}, {age} years old.|This is {name}, {age}.|"
        "{name} just celebrated turning {age}.",
        "name job": "{name} works as {a} {job}.|{name} is {a} {job}.|"
        "Our {job} is called {name}.|I am {name}, {a} {job}.|"
        "{name} became {a} {job}.|"
        "{name} earns money as {a} {job}.|My friend {name} is {a} {job}.|"
        "{name} was hired as {a} {job}.|The {job} {name} is here.",
        "name job city": "{name} is {a} {job} in {city}.|{name} works as {a} {job} in {city}.|"
        "{name} from {city} is {a} {job}.|The {job} {name} lives in {city}.|"
        "In {city}, {name} works as {a} {job}.",
        "name age job": "{name} is {age} and works as {a} {job}.|{name}, {age}, is {a} {job}.|"
        "The {job} {name} is {age} years old.|"
        "{name} is {a} {age} year old {job}.",
    }
    return _facts(s, f, kinds, a=_a(str(f["job"])))


def _facts(s: Source, f: dict[str, str | int], kinds: dict[str, str], **more: str) -> Facts:
    names = s.rng.choice([*kinds, next(iter(kinds))])
    sentence = s.phrase(kinds[names]).format(**f, **more)
    return Facts({k: f[k] for k in names.split()}, sentence)


def _order(s: Source) -> Facts:
    f: dict[str, str | int] = {
        "customer": s.name(),
        "item": s.thing(),
        "quantity": s.rng.randint(2, 99),
        "price": s.rng.randint(2, 999),
    }
    kinds = {
        "customer item quantity price": "{customer} ordered {quantity} {item} for {price} dollars.|"
        "We sold {quantity} {item} to {customer} at a price of {price} "
        "dollars.|"
        "For {price} dollars, {customer} bought {quantity} {item}.|"
        "Order: {quantity} {item} for {customer}, {price} dollars in total.|"
        "{customer} paid {price} dollars for {quantity} {item}.|"
        "{quantity} {item} were sold to {customer} for {price} dollars.|"
        "The bill of {customer}: {quantity} {item}, {price} dollars.|"
        "{customer} wants {quantity} {item} and pays {price} dollars.",
        "customer item quantity": "{customer} ordered {quantity} {item}.|"
        "{customer} bought {quantity} {item}.|"
        "Send {quantity} {item} to {customer}.|"
        "{quantity} {item} for {customer}, please.|"
        "{customer} needs {quantity} {item}.|"
        "{customer} would like {quantity} {item}.",
        "item price": "The {item} cost {price} dollars.|We sell {item} for {price} dollars.|"
        "{item} are {price} dollars.|You can buy {item} for {price} dollars.",
        "item quantity": "There are {quantity} {item}.|We have {quantity} {item} in stock.|"
        "{quantity} {item} arrived.|I counted {quantity} {item}.",
    }
    return _facts(s, f, kinds)


def _event(s: Source) -> Facts:
    event = s.word_of(EVENTS)
    f: dict[str, str | int] = {
        "event": event,
        "place": s.city(),
        "day": s.rng.choice(WEEK),
        "hour": s.rng.randint(1, 23),
        "guests": s.rng.randint(5, 500),
    }
    if s.lower:
        f["day"] = str(f["day"]).lower()
    kinds = {
        "event place day hour guests": "The {event} in {place} starts on {day} at {hour} with "
        "{guests} "
        "guests.|"
        "On {day} at {hour}, {guests} guests come to the {event} in {place}.|"
        "{place} hosts {a} {event} for {guests} guests on {day} at {hour}.|"
        "{guests} people will be at the {event} in {place} on {day} at {hour}.",
        "event place day": "The {event} in {place} is on {day}.|"
        "On {day} there is {a} {event} in {place}.|"
        "We have {a} {event} in {place} on {day}.|"
        "{place} hosts {a} {event} on {day}.",
        "event day hour": "The {event} starts on {day} at {hour}.|"
        "On {day} at {hour} there is {a} {event}.|"
        "See you at the {event} on {day} at {hour}.|"
        "The {event} is on {day} at {hour}.",
        "event place guests": "The {event} in {place} has {guests} guests.|"
        "{guests} guests came to the {event} in {place}.|"
        "In {place}, {guests} people visited the {event}.",
    }
    return _facts(s, f, kinds, a=_a(event))


def _pet(s: Source) -> Facts:
    animal = s.word_of(ANIMALS)
    f: dict[str, str | int] = {
        "owner": s.name(),
        "animal": animal,
        "pet_name": s.name(),
        "color": s.rng.choice(COLORS),
        "age": s.rng.randint(1, 30),
    }
    kinds = {
        "owner animal pet_name": "{owner} has {a} {animal} called {pet_name}.|"
        "{owner} owns {a} {animal} named {pet_name}.|"
        "The {animal} of {owner} is called {pet_name}.|"
        "{pet_name} is the {animal} of {owner}.",
        "owner animal color": "{owner} has a {color} {animal}.|The {animal} of {owner} is {color}.|"
        "{owner} bought a {color} {animal}.",
        "animal pet_name age": "Our {animal} {pet_name} is {age} years old.|"
        "{pet_name} is {a} {animal} and {age} years old.|"
        "The {animal} is called {pet_name} and is {age} years old.",
        "owner animal pet_name color age": "{owner} has a {color} {animal} called {pet_name} that "
        "is {age} years "
        "old.|"
        "The {color} {animal} of {owner} is {age} years old and called "
        "{pet_name}.|"
        "{owner} owns {pet_name}, a {color} {animal}, {age} years old.",
    }
    return _facts(s, f, kinds, a=_a(animal))


def _trip(s: Source) -> Facts:
    f: dict[str, str | int] = {
        "name": s.name(),
        "from": s.city(),
        "to": s.city(),
        "day": s.rng.choice(WEEK),
        "price": s.rng.randint(5, 999),
    }
    if s.lower:
        f["day"] = str(f["day"]).lower()
    kinds = {
        "name from to": "{name} travels from {from} to {to}.|{name} flies from {from} to {to}.|"
        "{name} takes the train to {to} from {from}.|"
        "{name} drove from {from} to {to}.",
        "from to price": "The train from {from} to {to} costs {price} dollars.|"
        "A ticket from {from} to {to} is {price} dollars.|"
        "From {from} to {to} you pay {price} dollars.",
        "name from to day": "On {day}, {name} travels from {from} to {to}.|"
        "{name} goes from {from} to {to} on {day}.|"
        "{name} leaves {from} for {to} on {day}.",
        "name from to day price": "On {day} {name} flies from {from} to {to} for {price} dollars.|"
        "{name} pays {price} dollars to get from {from} to {to} on {day}.|"
        "The ticket of {name} from {from} to {to} on {day} costs {price} "
        "dollars.",
    }
    return _facts(s, f, kinds)


def invented_facts(s: Source) -> tuple[dict[str, str | int], str]:
    """Return invented keys, each beside its value: the easiest sentence, which teaches copying."""
    values: dict[str, str | int] = {}
    for _ in range(s.rng.randint(2, 5)):
        key = s.invented(s.rng.choice([1, 2])) if s.chance(0.7) else s.rng.choice(list(NAMES))
        value: str | int = s.rng.randint(1, 999)
        if s.chance(0.7):
            value = s.rng.choice([s.name, s.city, s.thing, s.plain_word])()
        values[key] = value
    pairs = [s_join(s, key, value) for key, value in values.items()]
    return values, ", ".join(pairs) + s.rng.choice(["", "."])


def s_join(s: Source, key: str, value: str | int) -> str:
    return f"{key}{s.rng.choice([': ', ': ', ' is ', '='])}{value}"


def _listed(s: Source, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    if s.chance(0.2):
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


ASKS = (
    "Extract {k} as JSON: {s}|Give {k} as JSON: {s}|"
    "Return JSON with {k}: {s}|{s} Give me {k} as JSON.|"
    "Make JSON with {k} from this: {s}|"
    "Turn this into JSON with the keys {k}: {s}|{s} Extract {k} as JSON.|"
    "JSON with {k}: {s}|Write {k} as JSON. {s}|I need {k} as JSON: {s}|"
    "Get {k} from this sentence as JSON: {s}|"
    "Find {k} in the text and answer in JSON: {s}|"
    "{s} What are {k}? Answer as JSON.|Please extract {k} as JSON: {s}|"
    "{s} Return {k} in JSON format.|Parse this into JSON ({k}): {s}|"
    "Put {k} into a JSON object: {s}|Convert to JSON with {k}: {s}|"
    "Read this: {s} Now give {k} as JSON.|"
    "As JSON, with the fields {k}: {s}|"
    "From the sentence below, produce JSON with {k}. {s}|"
    "{s} As JSON with {k}, please.|"
    "Create a JSON object with the fields {k}: {s}|"
    "Text: {s} Task: extract {k} as JSON.|json {k}: {s}|"
    'Get me {k} in JSON. {s}|"{s}" - give {k} as JSON.|{k} as JSON: {s}|'
    "I have this sentence: {s} I want JSON with {k}.|"
    "{s} Now JSON with {k}.|"
    "Could you make JSON with {k} from: {s}|"
    "Read {k} from this text and write JSON: {s}|"
    "Sentence: {s} Fields: {k}. Format: JSON.|{s} Write down {k} as JSON.|"
    "Only {k} in JSON: {s}|"
    "Here is a text: {s} Please return {k} as JSON.|"
    "JSON please, keys {k}: {s}|"
    "Transform this sentence into JSON with {k}. {s}|"
    "What is {k} here? Answer with JSON. {s}|'{s}' as JSON with {k}|"
    "Take {k} out of this text as JSON: {s}|What are {k}? {s} Reply in JSON.|"
    "Give a JSON object containing {k}: {s}|Fill a JSON object with {k} from: {s}|"
    "Return a JSON with {k}. Text: {s}|Text: {s} Output: JSON with {k}.|"
    "{s} Please give {k} in JSON.|Output {k} as JSON for this text: {s}|"
    "Pull {k} from this as JSON: {s}|I want {k} as JSON. {s}|{s} Show {k} as JSON.|"
    "Summarize as JSON with {k}: {s}|{s} -> JSON with {k}|Only JSON, with {k}: {s}|"
    "Express this as JSON with {k}: {s}|Collect {k} in JSON: {s}|{s} I need {k} as JSON.|"
    "{s} Give me a JSON object with {k}.|Return {k} as a JSON object: {s}|"
    "Structure this as JSON ({k}): {s}|{s} Put {k} into JSON.|Make a JSON object of {k}: {s}"
)


def compact(values: dict[str, str | int]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def _some_facts(s: Source) -> Facts:
    return s.rng.choice([_person, _person, _person, _order, _order, _event, _pet, _trip])(s)


def named_facts(s: Source) -> Facts:
    """Return facts under any of the names that their keys may have."""
    if s.chance(0.25):
        return Facts(*invented_facts(s))
    values, sentence = _some_facts(s)
    names: dict[str, str] = {}
    for key in values:
        name = s.rng.choice(NAMES[key].split("|"))
        names[key] = key if name in names.values() or s.chance(0.4) else name
    if len(set(names.values())) < len(names):
        names = {key: key for key in values}
    named = {names[key]: value for key, value in values.items()}
    if s.chance(0.15):
        pairs = [s_join(s, key, value) for key, value in named.items()]
        s.rng.shuffle(pairs)
        sentence = ", ".join(pairs) + "."
    return Facts(named, sentence)


ASKS_ALL = (
    "Turn this into JSON: {s}|Make JSON of this: {s}|JSON: {s}|As JSON: {s}|{s} As JSON, please.|"
    "Convert this to JSON: {s}|Extract everything as JSON: {s}|Put this into JSON: {s}|"
    "Write this as JSON: {s}|{s} Now as JSON.|Give me all of it as JSON: {s}|to json: {s}"
)


def json_extraction(s: Source) -> Item:
    if s.chance(0.1):  # all facts, by their usual names, as the sentence has them
        values, sentence = _some_facts(s)
        keys = sorted(values, key=lambda key: sentence.find(str(values[key])))
        question = s.phrase(ASKS_ALL).format(s=sentence)
    else:
        values, sentence = named_facts(s)
        keys = s.rng.sample(list(values), s.rng.randint(1, len(values)))
        question = s.phrase(ASKS).format(k=_listed(s, keys), s=sentence)
    answer = compact({key: values[key] for key in keys})
    return s.item("json", question, answer.lower() if s.lower else answer)
