"""Problems of one step, in many short phrasings."""

import re

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import solved
from examples.train_demo.words import Item, Source

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SHORT = {
    "*": (
        "Each {x} has {a} {y}. How many {y} do {b} {x}s have?|"
        "A {x} costs {a} dollars. What do {b} {x}s cost?|"
        "One {x} holds {a} {y}. How many {y} fit into {b} {x}s?|"
        "We need {a} {y} for every {x}. How many {y} do we need for {b} {x}s?|"
        "{b} {x}s with {a} {y} each: how many {y} are there?|"
        "A {x} uses {a} {y} a day. How many {y} does it use in {b} days?|"
        "There are {b} tables with {a} {y} on each. How many {y} are on the "
        "tables?|{b} workers carry {a} {y} each. How many {y} do they carry?|"
        "Every day {a} {y} arrive. How many {y} arrive in {b} days?|"
        "A pack of {x} contains {a} {y}. You buy {b} packs. How many {y} do "
        "you get?|{a} {y} a week for {b} weeks, how many {y} is that?|"
        "It takes {a} minutes to paint one {x}. How many minutes do {b} {x}s "
        "take?|"
        "A room has {b} rows of {a} {y}. How many {y} are in the room?|"
        "A ticket is {a} dollars. How much do {b} tickets cost?|"
        "{b} kids have {a} {y} each, how many {y} do they have?|"
        "The price of a {x} is {a} dollars. I take {b}. What do I pay?|"
        "{b} {x}s hold {a} {y} each. How many {y} is that?|"
        "With {a} {y} in every {x}, how many {y} are in {b} {x}s?|"
        "If one {x} needs {a} {y}, how many {y} do {b} {x}s need?|"
        "A farmer plants {b} rows of {a} {y}. How many {y} are planted?|"
        "Somebody eats {a} {y} a day. How many {y} is that in {b} days?|"
        "{b} boxes, {a} {y} in each: how many {y}?|"
        "If a {x} costs {a} dollars, how much do {b} {x}s cost?"
    ),
    "/": (
        "{c} {y} are put into {b} {x}s equally. How many {y} are in each {x}?|"
        "{b} people share {c} {y}. How many {y} does each person get?|"
        "{b} friends share {c} {y}. How many does each get?|{b} children share {c} {y}. "
        "How many for each?|{b} friends split {c} {y} evenly. How many does everyone get?|"
        "A rope of {c} meters is cut into {b} equal parts. How many meters is "
        "each part?|"
        "{c} {y} are divided by {b} children. How many {y} does each child "
        "have?|{b} {x}s cost {c} dollars. How much is one {x}?|"
        "How many groups of {b} can {c} {y} form?|"
        "There are {c} {y} in {b} equal rows. How many {y} are in a row?|"
        "If {b} {x}s weigh {c} kilos, how heavy is one {x}?|"
        "Somebody packs {c} {y}, {b} to a {x}. How many {x}s are needed?|"
        "We have {c} {y} for {b} days. How many {y} can we use a day?|"
        "{c} students make {b} teams of the same size. How many students are "
        "in a team?|"
        "A trip of {c} miles takes {b} hours. How many miles is that per hour?|"
        "Share {c} {y} fairly between {b} friends. How many does each get?|"
        "Each {x} takes {b} {y}. How many {x}s can be filled with {c} {y}?|"
        "{c} {y} go into {b} {x}s, the same number in each. How many {y} does a {x} hold?|"
        "If {c} {y} are split among {b} children, how many {y} does each child get?|"
        "We cut {c} meters of rope into {b} pieces. How many meters long is a piece?|"
        "{b} tickets cost {c} dollars. How much does one ticket cost?|"
        "Divide {c} {y} into {b} groups. How many {y} are in a group?|"
        "{c} {y} for {b} people: how many {y} does each person get?"
    ),
    "+": (
        "{p} {y} are on the table and {q} on the floor. How many {y} are "
        "there?|"
        "A shop sold {p} {y} today and {q} yesterday. How many {y} did it "
        "sell?|There are {p} boys and {q} girls. How many children are there?|"
        "{p} {y} were here, then {q} more came. How many {y} are here now?|"
        "One {x} has {p} {y}, another has {q}. How many {y} do both have?|"
        "The first bag holds {p} {y}, the second {q}. How many {y} is that in "
        "total?|"
        "On one day I saw {p} {y} and on the next day {q}. How many {y} did I "
        "see?|"
        "A {x} costs {p} dollars and a hat {q} dollars. What do they cost "
        "together?|"
        "It was {p} degrees and got {q} degrees warmer. How many degrees is it "
        "now?|"
        "We drove {p} miles in the morning and {q} miles in the evening. How "
        "many miles did we drive?|"
        "{p} people wait and {q} others join them. How many people wait now?|"
        "Add {p} {y} to {q} {y}. How many {y} do you get?|"
        "The house has {p} {y} and the garden {q}. How many {y} are there "
        "altogether?|"
        "A book costs {p} dollars more than a pen, and the pen costs {q} "
        "dollars. What does the book cost?|"
        "{p} {y} are red and {q} are blue. How many {y} are there?|"
        "I have {p} {y} at home and {q} at school. How many {y} do I have?|"
        "If you have {p} {y} and get {q} more, how many {y} do you have?|"
        "In the morning {p} {y} came, in the evening {q}. How many {y} came?|"
        "My brother has {p} {y} and my sister {q}. How many {y} do they have?|"
        "A box has {p} {y} and a bag has {q}. How many {y} in all?"
    ),
    "-": (
        "There were {s} {y} and {q} of them left. How many {y} stayed?|"
        "A shop had {s} {y} and sold {q}. How many {y} does it still have?|"
        "{q} of {s} {y} are broken. How many {y} are fine?|"
        "From {s} {y} we take {q}. How many {y} remain?|"
        "A {x} had {s} {y} but {q} were lost. How many {y} are left?|"
        "{s} birds sat on a tree and {q} flew away. How many birds are still "
        "there?|"
        "A {x} of {s} dollars is now {q} dollars cheaper. How much is it?|"
        "It was {s} degrees and got {q} degrees colder. How many degrees is it "
        "now?|"
        "The road is {s} miles long and we have done {q}. How many miles are "
        "left?|"
        "We invited {s} guests, but {q} did not come. How many guests came?|"
        "I want {s} {y} and have {q}. How many {y} do I still need?|"
        "A book has {s} pages and {q} are read. How many pages are unread?|"
        "{s} seats, {q} taken. How many seats are free?|"
        "Out of {s} {y} the wind took {q}. How many {y} are left?|"
        "How many more are {s} {y} than {q} {y}?|"
        "If you have {s} {y} and lose {q}, how many {y} do you have left?|"
        "There are {s} {y}. You take {q}. How many {y} are left?|"
        "I had {s} {y} and gave away {q}. How many {y} do I have now?|"
        "{s} {y} were baked and {q} were eaten. How many {y} are left?|"
        "A box of {s} {y} has {q} bad ones. How many {y} are good?|"
        "We need {s} {y} but have only {q}. How many {y} are missing?|"
        "My bag holds {s} {y}. I take out {q}. How many {y} are still in it?"
    ),
}


def short(s: Source) -> Item:
    """Return a problem of one step, without a person."""
    rng = s.rng
    sign = rng.choice("+-*/")
    template = s.phrase(SHORT[sign])
    thing, one = s.thing(), s.plain_word(0.6)
    a, b = factors(rng, LIMIT)
    if min(a, b) < 2:
        a, b = 6, 7
    p = rng.randint(1, LIMIT - 1)
    q = rng.randint(1, LIMIT - p)
    said = NUMBERS[b] if b < len(NUMBERS) and s.chance(0.2) else b
    question = template.format(x=one, y=thing, a=a, b=said, c=a * b, p=p, q=q, s=p + q)
    question = question[0].upper() + question[1:]
    step, result = {
        "*": (f"{b}*{a}={a * b}", a * b),
        "/": (f"{a * b}/{b}={a}", a),
        "+": (f"{p}+{q}={p + q}", p + q),
        "-": (f"{p + q}-{q}={p}", p),
    }[sign]
    unit = _unit(template, thing, one)
    return solved(s, question, [f"{step} {unit}."], result)


def _unit(template: str, thing: str, one: str) -> str:
    """Return what the last sentence of a short story counts."""
    asked = re.split(r"(?<=[.:?,]) ", template)[-1]
    if "{x}s are needed" in asked or "{x}s can" in asked:
        return one + "s"
    if "groups" in asked:
        return "groups"
    if "pay" in asked or "cost" in asked or "How much" in asked:
        return "dollars"
    if "heavy" in asked:
        return "kilos"
    for word in (
        "children",
        "students",
        "birds",
        "guests",
        "pages",
        "seats",
        "miles",
        "degrees",
        "minutes",
        "meters",
        "people",
    ):
        if word in asked:
            return word
    return thing
