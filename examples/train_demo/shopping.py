"""Purchases: one or two kinds of things, with or without change."""

from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved
from examples.train_demo.words import Item, Source

BUY_TWO = (
    "{name} buys {a} {x} for {b} {coins} each and {c} {y} for {d} {coins} each.|"
    "{name} buys {a} {x} at {b} {coins} each and {c} {y} at {d} {coins} each.|"
    "{name} buys {a} {x} and {c} {y}. The {x} cost {b} {coins} each, the "
    "{y} {d} {coins} each.|"
    "One of the {x} costs {b} {coins}, one of the {y} {d} {coins}. {name} "
    "buys {a} {x} and {c} {y}.|"
    "{name} gets {a} {x} for {b} {coins} apiece and {c} {y} for {d} {coins} apiece.|"
    "In a shop {name} takes {a} {x}, each for {b} {coins}, and {c} {y}, "
    "each for {d} {coins}.|"
    "{name} pays {b} {coins} for each of {a} {x} and {d} {coins} for each of {c} {y}.|"
    "The {x} are {b} {coins} each and the {y} are {d} {coins} each. {name} "
    "buys {a} {x} and {c} {y}.|"
    "{name} orders {a} {x} for {b} {coins} each and also {c} {y} for {d} {coins} each.|"
    "First {name} buys {a} {x} at {b} {coins} each, then {c} {y} at {d} {coins} each.|"
    "{name} needs {a} {x} ({b} {coins} each) and {c} {y} ({d} {coins} each).|"
    "At {b} {coins} each {name} buys {a} {x}, and at {d} {coins} each {c} {y}.|"
    "{name} picks {a} {x} costing {b} {coins} each plus {c} {y} costing {d} {coins} each."
)
BUY_WITH_MONEY = (
    "{name} has {money} {coins} and buys {a} {x} for {b} {coins} each.|"
    "{name} buys {a} {x} at {b} {coins} each and pays with {money} "
    "{coins}.|"
    "With {money} {coins} {name} buys {a} {x} that cost {b} {coins} each.|"
    "{name} has {money} {coins}. {She} buys {a} {x} for {b} {coins} each.|"
    "{name} goes to the market with {money} {coins} and buys {a} {x}. Each "
    "costs {b} {coins}.|"
    "{name} takes {money} {coins} to the shop. {She} buys {a} {x} for {b} {coins} apiece.|"
    "The {x} cost {b} {coins} each. {name} buys {a} of them and has {money} {coins}.|"
    "{name} pays for {a} {x} with {money} {coins}. One costs {b} {coins}.|"
    "Out of {money} {coins}, {name} buys {a} {x} at {b} {coins} each.|"
    "{name} has {money} {coins} in the wallet and buys {a} {x} for {b} {coins} apiece.|"
    "{name} got {money} {coins} and buys {a} {x}, {b} {coins} each."
)
BUY = (
    "{name} buys {a} {x} for {b} {coins} each.|"
    "{name} buys {a} {x}. Each costs {b} {coins}.|"
    "One of the {x} costs {b} {coins}. {name} buys {a} of them.|"
    "{name} buys {a} {x} at {b} {coins} each.|"
    "The {x} cost {b} {coins} each and {name} buys {a}.|"
    "{name} pays {b} {coins} for each of {a} {x}.|"
    "{name} orders {a} {x} at a price of {b} {coins} each.|"
    "{name} wants {a} {x} and each is {b} {coins}.|"
    "A shop sells {x} for {b} {coins} each. {name} takes {a}.|"
    "{name} needs {a} {x}. One costs {b} {coins}.|"
    "Each of the {x} is {b} {coins}. {name} buys {a}.|"
    "{name} goes shopping for {a} {x}, {b} {coins} apiece.|"
    "At {b} {coins} each, {name} buys {a} {x}.|{name} picks {a} {x} that cost {b} {coins} each."
)
CHANGE = (
    "How much money is left?|How many {coins} does {she} have left?|"
    "How much is left?|How much change does {she} get?|"
    "How many {coins} are left?|What is the change?|"
    "How much money does {name} have left?|How many {coins} remain?|"
    "How many {coins} does {name} keep?|How much does {she} get back?|"
    "What is left over?|How much does {she} have left?|How many {coins} are left over?|"
    "How much money remains?|How much change is that?"
)
COST = (
    "How much does {she} pay?|How much does {name} pay?|"
    "How many {coins} does {she} spend?|How much does it cost?|"
    "How much is that in total?|What does {name} pay in total?|"
    "What is the total price?|How much does {name} spend?|"
    "How many {coins} does {name} need?|What is the bill?|"
    "How expensive is that?|How much money does {she} need?|"
    "How much does {name} have to pay?|What does it cost?|How many {coins} is that?|"
    "What is the price in total?|How much money is that?|How much is the bill?|"
    "What does {she} have to pay?|How many {coins} does {she} pay?|What does that cost?"
)


def shop(s: Source) -> Item:
    """Return a problem of one or two purchases, with or without change."""
    rng, who, past = s.rng, s.person(), s.chance(0.35)
    one, money_word = s.thing(), rng.choice(["dollars"] * 4 + ["euros", "coins", "cents", "pounds"])
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "coins": money_word,
        "x": one,
    }
    a, b = factors(rng, 90)
    values |= {"a": a, "b": b}
    kind = rng.choice(["one", "two", "two", "change", "change"])
    steps = [f"The {one} cost {a}*{b}={a * b} {money_word}."]
    if kind == "two":
        two = s.thing()
        while True:
            c, d = factors(rng, 90)
            if a * b + c * d <= LIMIT:
                break
        total = a * b + c * d
        buys = fill(s, BUY_TWO, past, y=two, c=c, d=d, **values)
        steps += [
            f"The {two} cost {c}*{d}={c * d} {money_word}.",
            f"Together {a * b}+{c * d}={total} {money_word}.",
        ]
    else:
        total = a * b
        money = rng.randint(total + 1, LIMIT) if kind == "change" else 0
        budget = BUY_WITH_MONEY
        plain = BUY
        buys = fill(s, budget if money else plain, past, money=money, **values)
        if money:
            steps.append(f"{money}-{total}={money - total} {money_word}.")
            end = fill(s, CHANGE, False, **values)
            return solved(s, f"{buys} {end}", steps, money - total)
    end = fill(s, COST, False, **values)
    return solved(s, f"{buys} {end}", steps, total)
