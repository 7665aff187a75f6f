"""The sentences of word problems: their verbs agree with the subject and change tense."""

import re

from examples.train_demo.words import Item, Person, Source

PLACES = "shelf table floor desk truck garden room box bag basket drawer kitchen".split()
GAIN = (
    "{other} gives {her} {n} more.|{She} buys {n} more.|"
    "{She} finds {n} {thing}.|{She} gets {n} more from {other}.|"
    "Then {other} sends {her} another {n} {thing}.|{She} makes {n} more.|"
    "{She} collects {n} more {thing}.|"
    "{other} hands {her} {n} {thing}.|Later {she} wins {n} {thing}.|{She} picks up {n} others.|"
    "Then {n} more {thing} are added.|"
    "{She} receives {n} {thing} as a present.|{n} more come from {other}.|"
    "After that {she} adds {n} {thing}.|"
    "{She} borrows {n} {thing} from {other}.|{She} earns {n} more.|"
    "{other} brings {her} {n} {thing}.|{She} is given {n} {thing}.|{n} new {thing} arrive.|"
    "{other} lends {her} {n} {thing}.|{She} gains {n} more.|{She} orders {n} more {thing}.|"
    "Then {she} buys {n} {thing} from {other}.|{other} leaves {n} {thing} for {her}.|"
    "{She} discovers {n} more {thing}.|{n} more {thing} come in the mail.|"
    "Then {she} finds {n} more in the kitchen.|For a birthday {she} gets {n} {thing}.|"
    "{She} gathers {n} more.|{other} adds {n} {thing}.|{She} brings {n} more home.|"
    "Another {n} {thing} are delivered."
).split("|")
LOSS = (
    "{She} gives {n} to {other}.|{She} loses {n}.|{She} sells {n} of them.|"
    "{other} takes {n} {thing}.|"
    "Then {n} {thing} break.|{She} throws {n} away.|"
    "{She} uses {n} {thing}.|{She} gives away {n} {thing}.|"
    "{n} of them get lost.|{She} drops {n} of the {thing}.|{She} hands {n} of them to {other}.|"
    "Then {she} eats {n}.|{other} borrows {n} of them.|"
    "{She} donates {n} {thing}.|{other} steals {n}.|"
    "{She} lets {other} have {n} {thing}.|Later {n} are stolen.|"
    "{She} breaks {n} of them.|{She} gives {other} {n} {thing}.|"
    "{She} sends {n} {thing} to {other}.|{n} {thing} go missing.|{n} of the {thing} disappear.|"
    "{She} trades {n} of them away.|{She} returns {n}.|{other} eats {n} of them.|"
    "{other} gets {n} of them from {her}.|{She} spends {n} of them.|"
    "{She} lends {n} {thing} to {other}.|{other} wins {n} {thing} from {her}.|"
    "{She} burns {n} of them.|{n} of them are thrown away.|{She} misplaces {n} {thing}.|"
    "Then {n} are sold.|{other} buys {n} of them from {her}."
).split("|")
PAST = {
    "gives": "gave",
    "buys": "bought",
    "finds": "found",
    "gets": "got",
    "sends": "sent",
    "makes": "made",
    "collects": "collected",
    "hands": "handed",
    "wins": "won",
    "picks": "picked",
    "are": "were",
    "receives": "received",
    "come": "came",
    "adds": "added",
    "borrows": "borrowed",
    "earns": "earned",
    "loses": "lost",
    "sells": "sold",
    "takes": "took",
    "break": "broke",
    "throws": "threw",
    "uses": "used",
    "get": "got",
    "drops": "dropped",
    "eats": "ate",
    "donates": "donated",
    "steals": "stole",
    "lets": "let",
    "brings": "brought",
    "arrive": "arrived",
    "lends": "lent",
    "gains": "gained",
    "orders": "ordered",
    "leaves": "left",
    "discovers": "discovered",
    "gathers": "gathered",
    "breaks": "broke",
    "go": "went",
    "disappear": "disappeared",
    "trades": "traded",
    "returns": "returned",
    "spends": "spent",
    "burns": "burned",
    "misplaces": "misplaced",
    "begins": "began",
    "holds": "held",
    "counts": "counted",
    "has": "had",
    "is": "was",
    "costs": "cost",
    "cost": "cost",
    "pays": "paid",
    "reads": "read",
    "does": "did",
}


def tense(text: str, past: bool) -> str:
    """Put `text` into the past if wanted; questions keep the infinitive after do, does and did."""
    if not past:
        return text
    return re.sub(r"[A-Za-z]+", lambda m: PAST.get(m[0], m[0]), text)


def fill(s: Source, options: str | list[str], past: bool, **values: object) -> str:
    """Return a phrasing with its values; verbs change tense before names are filled in."""
    text = tense(s.phrase(options), past)
    text = agree(text.format(**values))
    return text[0].upper() + text[1:]


def agree(text: str) -> str:
    """Make verbs agree with I and we: have instead of has."""

    def base(match: re.Match[str]) -> str:
        subject, verb = match[1], match[2]
        plain = {"has": "have", "does": "do", "is": "are", "goes": "go", "was": "were"}.get(verb)
        if plain is None:
            plain = verb[:-1] if verb.endswith("s") and verb not in ("is", "was") else verb
        if subject == "I" and verb in ("is", "was"):
            plain = {"is": "am", "was": "was"}[verb]
        return f"{subject} {plain}"

    text = re.sub(r"\b(I|[Ww]e) ([a-z]+)\b", base, text)
    for verb, plain in (("does", "do"), ("has", "have")):
        text = re.sub(rf"\b{verb} (I|we)\b", rf"{plain} \1", text)
    text = re.sub(r"\b(is|are) I\b", "am I", text)
    return re.sub(r"\bis we\b", "are we", text)


def solved(s: Source, question: str, steps: list[str], result: int) -> Item:
    return s.item("math", question, " ".join(steps) + f" The answer is {result}.")


def two_people(s: Source) -> tuple[Person, str]:
    return s.person(), s.name()
