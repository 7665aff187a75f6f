"""Word problems in one to three steps, every step an equation with its unit.

Stories are composed of sentences, each with many phrasings.
"""

from collections.abc import Callable

from examples.train_demo.comparisons import age, compare, parts
from examples.train_demo.rates import rate
from examples.train_demo.shopping import shop
from examples.train_demo.short_problems import short
from examples.train_demo.stories import groups, share, story
from examples.train_demo.words import Item, Source

FAMILIES: tuple[Callable[[Source], Item], ...] = (
    story, story, story, short, short, short, groups, groups, shop, shop, share, compare, parts,
    rate, rate, age,
)  # fmt: skip


def word_problem(s: Source) -> Item:
    return s.rng.choice(FAMILIES)(s)
