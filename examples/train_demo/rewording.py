"""Other words for what the phrasings say: training questions only, so that a model reads more ways.

A rewording keeps the question's meaning and answer. Names, things and words of the answer stay.
"""

import re

from examples.train_demo.words import Item, Source

# What may stand for the words before the colon. An empty alternative leaves them out.
WORDS = """
what is: what's, whats, what would be, what might be, tell me what is
what are: what're, what might be, tell me what are
how many: what number of, how many of the, how mny
how much is: how much does it make, what do I get for, what is, what's
please: pls, plz, kindly,
can you: could you, would you, will you, are you able to
i would like: i'd like, i wish for, i want
i want: i'd like, i need, i wish
i need: i require, i want, i'd need
do not: don't, dont
does not: doesn't, doesnt
i am: i'm, im
it is: it's, its
there are: there're, we have, you see, we see
there is: there's, we have
calculate: compute, work out, figure out, determine, evaluate
find: look for, get, locate, search for, determine
give me: hand me, get me, provide, show me, let me have, i want
give: hand, provide, supply, present, output
show me: let me see, display, give me, present
show: display, present, list, output, give
tell me: say, let me know, answer, explain
write me: make me, give me, code me, create me
write: code up, produce, compose, draft, make, create, put down
make: build, create, produce, generate, prepare
create: make, generate, produce, construct, build
return: give back, yield, hand back, output, deliver
returns: gives back, hands back
returning: giving back, yielding, giving
extract: pull out, take, grab, fetch, collect, pick out, get
output: print, emit, return, produce
convert: turn, change, rewrite, translate
transform: change, rewrite, convert, translate
express: write, represent, encode, render
with: having, using, containing
containing: with, having, that contains, holding
text: passage, string, note, message, line
sentence: statement, text, line, message
function: method, routine, func, procedure, fn
list: array, sequence
elements: entries, members, values, items
numbers: values, figures, nums, integers
words: terms, items, entries
word: term, expression
letters: characters, chars
letter: character
fields: entries, attributes, properties, keys
keys: fields, attributes, names
json object: JSON, JSON record, json structure
json: a JSON object, json, valid JSON, JSON format
total number of: overall number of, number of, sum of
total of: sum of
in total: altogether, all in all, in all, overall, in sum, combined
altogether: in total, in all, overall, combined, as a whole
together: in total, combined, between them, jointly
have left: still have, have remaining, end up with
left: remaining, left over, still there
has: owns, possesses, holds, keeps, has got
had: owned, started with, possessed, kept
buys: purchases, gets, picks up, orders, acquires
bought: purchased, got, ordered, picked up, acquired
sells: sold off, trades away, gives up
gets: receives, obtains, gains, is given
got: received, obtained, gained, was given
gives away: hands out, donates, parts with
finds: spots, comes across
found: discovered, came across, spotted
loses: misplaces, drops
lost: misplaced, dropped
costs: is priced at, sells for, goes for, is worth
pays: spends, hands over, gives
every: each
people: persons, guests, friends
then: after that, afterwards, next, later, and then
later: afterwards, after a while, then, the next day
after that: then, afterwards, next
now: at this point, at the moment, in the end, by now, currently
today: now, currently, at present, this year
needs: requires, must have, wants
smallest: lowest, least, minimal, tiniest
biggest: largest, greatest, highest, maximal
largest: biggest, greatest, highest, maximal
lowest: smallest, least
highest: largest, greatest, biggest, top
in reverse: backwards, from back to front, the other way round
reverse order: opposite order, inverted order, backward order
reverse: invert, flip, turn around, mirror
backwards: in reverse, the other way round, from back to front, back to front
sort: order, arrange, rank, put in order
arrange: sort, order, line up, put
ascending: increasing, rising, growing
descending: decreasing, falling, shrinking
alphabetically: in alphabetical order, by alphabet, from a to z
spell: spell out, write the letters of
repeat: say again, copy, echo
gap: blank, hole, empty place, space
missing: left out, absent, not there
fill in: complete, fill, add
add: append, include, put in, attach, insert
remove: delete, take out, drop, strike, erase, leave out
without: leaving out, except, excluding, minus
leave out: omit, drop, skip, exclude
rename: change the name of, relabel
replace: swap, exchange, substitute
keep: retain, leave, hold on to
only: just, nothing but, solely, merely
instead of: in place of, rather than
instead: rather, in its place
another: one more, an additional, a further
fewer: less
also: too, as well
same: identical, very same
should be: must be, has to be, ought to be, shall be
whether: if
are there: do we have, are we talking about, does that make, can be counted
from: out of
here is: here's, this is, below is, look at
following: given, next, below
this: the following, that
these: those, the following
the:
a:
of these:
in python: with python, using python, as python code, in py
python: py
divided by: over, split by
multiplied by: times
plus: and, added to
minus: less, take away
"""


def _alternatives() -> dict[str, list[str]]:
    pairs = [line.split(":") for line in WORDS.strip().split("\n")]
    return {before: [w.strip() for w in after.split(",")] for before, after in pairs}


ALTERNATIVES = _alternatives()
LONGEST_FIRST = sorted(ALTERNATIVES, key=len, reverse=True)
PATTERN = re.compile(rf"\b(?:{'|'.join(LONGEST_FIRST)})\b(?![:=])", re.IGNORECASE)


def _may_change(source: Source, words: str, spared: set[str]) -> bool:
    """Return whether to offer the words for a rewording; `spared` is in lower case."""
    article = words.lower() in ("the", "a")  # so frequent that a third of them is enough
    return not spared & set(words.lower().split()) and not (article and source.chance(0.7))


def reworded(source: Source, item: Item) -> Item:
    """Return the item with one to three of its words replaced, if the answer has none of them."""
    spared = {w for text in (item.answer, *source.drawn) for w in re.findall(r"\w+", text.lower())}
    if item.task == "outside":
        spared.clear()
    found = [m for m in PATTERN.finditer(item.question) if _may_change(source, m[0], spared)]
    chosen = source.rng.sample(found, min(len(found), source.rng.choice([1, 1, 2, 3])))
    question = item.question
    for match in sorted(chosen, key=lambda m: -m.start()):
        new = source.rng.choice(ALTERNATIVES[match[0].lower()])
        if match[0][0].isupper() and not match[0].isupper():
            new = new[:1].upper() + new[1:]
        question = question[: match.start()] + new + question[match.end() :]
    question = re.sub(" +", " ", question).strip()
    if not re.search(r"\w", question):
        return item
    first = item.key.split(" / ")[0] + " / " if item.before else ""
    return item._replace(question=question, key=first + source.key(question))
