"""Random pinned canvases over small vocabularies, and what fits them."""

import random
from collections.abc import Sequence as Items

from diffray.components.grammar.template import Slot, Template
from tests.helpers.random_grammars import random_automaton, state_after


def random_canvas(draw: random.Random, size: int, mask_id: int, end_id: int) -> Template:
    """Return a canvas of some slots between literals, with just enough positions or with more."""
    usual = [token for token in range(size) if token not in (mask_id, end_id)]
    cells, slots = draw.choices(usual, k=draw.randint(0, 9)), []
    for number in range(draw.randint(1, 5)):
        automaton = random_automaton(draw, size, (end_id,))
        length = max(automaton.shortest - 1, 1) + draw.choice((0, 0, 1, 6))
        following = draw.choices(usual, k=draw.choice((1, 2, 3, 20)))
        options = {tuple(draw.choices(usual, k=draw.randint(1, length))) for _ in range(3)}
        tokens = tuple(sorted(options)) if draw.random() < 0.7 else ()
        slots.append(Slot(f"f{number}", automaton, following[0], tuple(map(str, tokens)), tokens))
        cells += [-1 - number] * length + following
    return Template((*cells, end_id), tuple(slots))


def fits(canvas: Template, ids: Items[int], banned: frozenset[int] = frozenset()) -> bool:
    """Whether these tokens are the canvas's literals with a value of each slot in its place."""
    places = {0}  # in `ids`, that the cells so far may end at
    numbers: set[int] = set()
    for cell in canvas.cells:
        if cell >= 0:
            places = {at + 1 for at in places if at < len(ids) and ids[at] == cell}
        elif -1 - cell not in numbers:
            numbers.add(-1 - cell)
            automaton = canvas.slots[-1 - cell].automaton.without(banned)
            most = canvas.cells.count(cell)
            places = {
                stop
                for at in places
                for stop in range(at, min(at + most, len(ids)) + 1)
                if (state := state_after(automaton, ids[at:stop])) is not None
                and automaton.distance_Q[state] == 1
            }
    return len(ids) in places
