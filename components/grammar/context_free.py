"""From a context-free grammar to an automaton over bytes.

When a rule uses another one, the place to return to must be remembered. An automaton has a finite
memory, so rules are nested up to a depth: it accepts only texts of the grammar, but not all of
them. The last part of a rule needs no return, so it may use the rule any number of times, and so
may the first part.

Letters: B bytes, C classes of bytes, P places in the rules, Q states.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from diffray.components.grammar.expressions import over_bytes, too_large
from diffray.components.grammar.gbnf import Either, Node, Ref, Regex, Repeat, Row, Rules, Text

_MOST_STATES: Final = 2**12
_MOST_STACKS: Final = 2**17  # to look at, in a second
_MOST_PLACES: Final = 2**14
DEEPEST: Final = 32
_RETURN: Final = 0  # the place at the end of every rule

Stack = tuple[int, ...]  # the places to return to, and the current one
State = frozenset[Stack]


class Bounded(NamedTuple):
    """An automaton over bytes; its texts nest calls up to a depth, or None if it accepts all."""

    next_BQ: np.ndarray
    accepting_Q: np.ndarray
    depth: int | None


def bounded(rules: Rules) -> Iterator[Bounded]:
    """Yield automata of increasing depth, up to the last one that is small enough."""
    try:
        network = _Network(rules)
        for depth in range(DEEPEST):
            found = network.automaton(depth)
            if found is None:
                return
            yield found
            if found.depth is None:
                return
    except RecursionError:
        raise too_large() from None


class _Network:
    """Places in the rules, and the transitions between them.

    A transition reads a byte, reads nothing, or calls a rule.
    """

    def __init__(self, rules: Rules) -> None:
        self._stacks_left = _MOST_STACKS
        self._free: list[list[int]] = [[]]  # the places that are reached without a byte
        self._calls: dict[int, tuple[str, int]] = {}  # a rule, and where to go on
        self._bytes: dict[int, np.ndarray] = {}  # the place after each byte, or -1
        self._regexes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        laid: dict[str, Node] = {}
        for name, node in rules.items():
            laid |= _without_left_recursion(name, node)
        self._entries = {name: self._lay(node, _RETURN) for name, node in laid.items()}
        table_PB = np.array([np.full(256, -1), *self._bytes.values()])
        table_PC, self._class_B = np.unique(table_PB, axis=1, return_inverse=True)
        self._classes = table_PC.shape[1]
        self._after = {
            place: [(number, after) for number, after in enumerate(row_C) if after >= 0]
            for place, row_C in zip(self._bytes, table_PC[1:].tolist(), strict=True)
        }

    def automaton(self, depth: int) -> Bounded | None:
        """Return the automaton of the texts of this depth, or None if it is too large."""
        numbers: dict[State, int] = {}
        reached: dict[State, int] = {frozenset(): -1}  # before transitions that read nothing
        states: list[State] = []
        exact = True

        def number_of(stacks: State) -> int:
            nonlocal exact
            if stacks not in reached:
                state, whole = self._settled(stacks, depth)
                exact = exact and whole
                if state and state not in numbers:
                    numbers[state] = len(states)
                    states.append(state)
                reached[stacks] = numbers.get(state, -1)
            return reached[stacks]

        number_of(frozenset([(self._entries["root"],)]))
        rows = []
        for state in states:  # the list grows meanwhile
            if len(states) > _MOST_STATES:
                return None
            after: list[set[Stack]] = [set() for _ in range(self._classes)]
            for *below, place in state:
                for number, following in self._after.get(place, ()):
                    after[number].add((*below, following))
            rows.append([number_of(frozenset(stacks)) for stacks in after])
        if self._stacks_left < 0:
            return None
        next_CQ = np.array(rows, dtype=np.int32).reshape(-1, self._classes).T
        accepting_Q = np.array([(_RETURN,) in state for state in states])
        return Bounded(next_CQ[self._class_B], accepting_Q, None if exact else depth)

    def _settled(self, stacks: State, depth: int) -> tuple[State, bool]:
        """Return where a byte or the end may follow, and whether no call was too deep."""
        seen, found, exact = set(stacks), set(), True
        todo = list(stacks)
        while todo and self._stacks_left >= 0:
            self._stacks_left -= 1
            stack = todo.pop()
            *below, place = stack
            following = [(*below, each) for each in self._free[place]]
            if place in self._after or stack == (_RETURN,):
                found.add(stack)
            elif place == _RETURN:
                following.append((*below,))
            elif place in self._calls:
                rule, back = self._calls[place]
                if back != _RETURN:
                    below.append(back)
                if len(below) <= depth:
                    following.append((*below, self._entries[rule]))
                else:
                    exact = False
            todo += [each for each in following if each not in seen]
            seen |= set(following)
        return frozenset(found), exact

    def _lay(self, node: Node, onward: int) -> int:
        """Return the place from which the texts of a node lead to `onward`."""
        match node:
            case Text(spelled):
                for byte in reversed(spelled):
                    after_B = np.full(256, -1)
                    after_B[byte] = onward
                    onward = self._place()
                    self._bytes[onward] = after_B
            case Regex(regex):
                return self._lay_regex(regex, onward)
            case Ref(rule):
                place = self._place()
                self._calls[place] = rule, onward
                return place
            case Row(parts):
                for part in reversed(parts):
                    onward = self._lay(part, onward)
            case Either(options):
                return self._place(*(self._lay(option, onward) for option in options))
            case Repeat(part, least, None):
                again = self._place(onward)
                self._free[again].append(self._lay(part, again))
                onward = again
                for _ in range(least):
                    onward = self._lay(part, onward)
            case Repeat(part, least, int(most)):
                end = onward
                for _ in range(most - least):
                    onward = self._place(self._lay(part, onward), end)
                for _ in range(least):
                    onward = self._lay(part, onward)
        return onward

    def _lay_regex(self, regex: str, onward: int) -> int:
        if regex not in self._regexes:
            self._regexes[regex] = over_bytes(regex)
        next_BQ, accepting_Q = self._regexes[regex]
        alive_Q = np.append(accepting_Q, False)  # the last one is for -1
        while not np.array_equal(alive_Q[:-1], more_Q := alive_Q[:-1] | alive_Q[next_BQ].any(0)):
            alive_Q[:-1] = more_Q
        first = len(self._free)
        for accepting, after_B in zip(accepting_Q, next_BQ.T, strict=True):
            place = self._place(*([onward] if accepting else []))
            self._bytes[place] = np.where(alive_Q[after_B], after_B + first, -1)
        return first

    def _place(self, *free: int) -> int:
        if len(self._free) > _MOST_PLACES:
            raise too_large()
        self._free.append([*free])
        return len(self._free) - 1


def _without_left_recursion(name: str, node: Node) -> dict[str, Node]:
    """Return the rule, split into two if some options start with the rule itself.

    Such options only append to, or join, texts of the other options.
    """
    own = Ref(name)
    options = [each.parts if isinstance(each, Row) else (each,) for each in _options(node)]
    if all(option[:1] != (own,) for option in options):
        return {name: node}
    joins, appended, others = [], [], []
    for option in options:
        if option[:1] != (own,):
            others.append(Row(option))
        elif len(option) > 1 and option[-1] == own:
            joins.append(Row(option[1:-1]))
        elif len(option) > 1:
            appended.append(Row(option[1:]))
    unit = Ref(f"{name}'")  # a name that no grammar can have
    more = Either((*(Row((join, unit)) for join in joins), *appended))
    return {name: Row((unit, Repeat(more, 0, None))), unit.rule: Either((*others,))}


def _options(node: Node) -> list[Node]:
    if isinstance(node, Row) and len(node.parts) == 1:
        return _options(node.parts[0])
    return list(node.options) if isinstance(node, Either) else [node]
