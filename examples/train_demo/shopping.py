"""Purchases: one or two kinds of things, with or without change."""

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved
from examples.train_demo.words import Item, Source, bank

BANK = bank("shopping")


def shop(s: Source) -> Item:
    """Return a problem of one or two purchases, with or without change."""
    rng, who, past = s.rng, s.person(), s.chance(0.35)
    one, money_word = s.thing(), rng.choice(["dollars"] * 4 + ["euros", "coins", "cents", "pounds"])
    values = who.values() | {"coins": money_word, "x": one}
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
        buys = fill(s, BANK["buy_two"], past, y=two, c=c, d=d, **values)
        steps += [
            f"The {two} cost {c}*{d}={c * d} {money_word}.",
            f"Together {a * b}+{c * d}={total} {money_word}.",
        ]
    else:
        total = a * b
        money = rng.randint(total + 1, LIMIT) if kind == "change" else 0
        buys = fill(s, BANK["buy_with_money" if money else "buy"], past, money=money, **values)
        if money:
            steps.append(f"{money}-{total}={money - total} {money_word}.")
            end = fill(s, BANK["change"], False, **values)
            return solved(s, f"{buys} {end}", steps, money - total)
    end = fill(s, BANK["cost"], False, **values)
    return solved(s, f"{buys} {end}", steps, total)
