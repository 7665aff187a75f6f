"""Words and phrasings, and the source from which generators draw them.

Names, things and phrasings are split by hash: one entity in eight and one phrasing in ten are never
used in training. Most entities are invented words, so that a model has to copy what it reads.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

FIRST = (
    "Lily Tom Anna Ben Mia Sam Zoe Max Emma Leo Ella Jack Nina Paul Ruth Omar Ivy Noah Clara Finn "
    "Maya Alex Lucy Hugo Sara Carl Rosa Eric Jane Adam Vera Ryan Dina Mark Gina Luke Tina Oscar "
    "Alice Bob Carol David Eve Frank Grace Henry Irene James Kate Liam Mary Nick Olivia Peter "
    "Rachel Steve Sofia Tim Ursula Victor Wendy Xavier Yuki Zack Ahmed Amir Anita Boris Chen Diego "
    "Elena Fatima Giulia Hans Ines Ivan Jamal Kenji Kofi Layla Li Magnus Mei Mohammed Nadia Olga "
    "Pablo Priya Raj Sven Tariq Uma Wei Yasmin Zara John Linda Laura Julia "
    "Kevin Brian Daniel Emily "
    "Hannah Jacob Lena Marie Nora Oliver Simon Thomas Walter"
).split()
SHE = set(
    "Lily Anna Mia Zoe Emma Ella Nina Ruth Ivy Clara Maya Lucy Sara Rosa Jane Vera Dina Gina Tina "
    "Alice Carol Eve Grace Irene Kate Mary Olivia Rachel Sofia Ursula "
    "Wendy Yuki Anita Elena Fatima "
    "Giulia Ines Layla Mei Nadia Olga Priya Uma Yasmin Zara Linda Laura Julia Emily Hannah Lena "
    "Marie Nora".split()
)
SURNAMES = (
    "Adams Baker Carter Dalton Ellis Fisher Gordon Harper Irving Keller Larsen Mason Norton Parker "
    "Reed Stone Turner Walker Winter Young Smith Jones Brown Miller Davis Garcia Wilson Lopez "
    "Nguyen Kim Patel Singh Silva Rossi Weber Novak Tanaka Ivanov Haddad Okafor"
).split()
CITIES = (
    "Berlin Boston Cairo Dallas Delhi Dublin Geneva Lima Lisbon London Madrid Milan Moscow Oslo "
    "Paris Porto Prague Rome Seattle Tokyo Toronto Vienna Warsaw Zurich Athens Austin Bangkok "
    "Beijing Bergen Bern Bogota Bristol Brussels Chicago Cologne Denver Dubai Florence Hamburg "
    "Havana Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lyon Manila Miami Munich Nairobi Naples "
    "Osaka Oxford Quito Riga Seoul Sydney Tunis Turin Utrecht Venice York"
).split()
THINGS = (
    "apples pens books cards marbles stickers shells coins pears cookies stamps flowers eggs toys "
    "balloons pencils cups buttons lemons plums candles badges oranges "
    "bananas cakes candies chairs "
    "tables lamps boxes bottles hats shirts shoes socks keys stones ropes nails tickets magazines "
    "notebooks letters photos paintings plates spoons forks knives bowls glasses bags baskets "
    "tomatoes potatoes carrots onions peaches cherries grapes nuts muffins donuts pies pizzas "
    "sandwiches rings beads ribbons bricks tiles boards brushes bulbs plants trees roses tulips "
    "fish birds cats dogs rabbits ducks hens horses sheep cows goats bikes cars trucks boats kites "
    "balls bats robots puzzles dolls blocks crayons markers erasers rulers folders phones cables"
).split()
JOBS = (
    "nurse teacher baker pilot farmer lawyer painter driver chef engineer doctor writer plumber "
    "carpenter dentist singer dancer actor waiter barber butcher gardener librarian judge soldier "
    "sailor tailor mechanic scientist programmer designer journalist photographer musician banker "
    "builder cleaner coach poet potter"
).split()
COMMON = (
    "red blue green black white small big old new fast slow cold warm "
    "happy sad quiet loud sun moon "
    "star sky sea river lake hill road house door window garden tree leaf "
    "grass stone sand snow rain "
    "wind cloud fire water bread milk tea coffee sugar salt rice soup fish "
    "meat cheese butter honey "
    "dog cat bird horse mouse lion tiger bear wolf fox frog snake bee ant train plane ship bus car "
    "bike wheel hand foot head arm leg eye ear nose king queen prince farm "
    "school town market bridge "
    "tower castle island forest desert valley music song book page pencil paper clock chair table "
    "lamp bed cup plate spoon knife bottle box bag hat coat shoe ring gold silver iron glass wood "
    "silk cotton north south east west winter summer spring autumn morning night dance dream light "
    "shadow storm thunder ocean planet rocket robot magic dragon giant story letter number circle "
    "square line point apple banana cherry grape lemon mango melon orange peach plum"
).split()
ONSETS = (
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr kl kr pl pr qu sh sk sl sn "
    "sp st th tr tw v z y x"
).split()
VOWELS = "a e i o u a e i o u a e i o u ai ea ee oo ou ia y".split()
CODAS = "n r l s t m k x ck nd nt ng rd rt st sh th lt mp p g b".split()
SENTENCES = (
    "It is a sunny day.|I hope you are well.|This is for school.|I need it soon.|Good morning.|"
    "Here is a question.|Let me ask you something.|I am stuck.|My friend asked me this.|"
    "The weather is nice today.|This should be easy.|Please help me.|I have a small task for you.|"
    "We talked about this in class.|Hello!|Hi there.|Hey.|It is raining outside.|"
    "I was thinking about this.|This one is for my homework.|Take your time.|Be careful.|"
    "I forgot how this works."
).split("|")
ENDINGS = "Thanks!|Thank you.|Please.|Thank you very much.|Be brief.|Cheers.|Thanks a lot.".split(
    "|"
)


class Item(NamedTuple):
    """A question, its answer, and the turns before it.

    `system` shows functions that may be called; `role` asks: the user, or a tool with its result.
    `key` is the question before noise, with names and things blanked: items with equal keys are
    near-duplicates.
    """

    task: str
    question: str
    answer: str
    key: str = ""
    before: tuple[tuple[str, str], ...] = ()
    system: str = ""
    role: str = "user"


def bucket(text: str, buckets: int) -> int:
    return int.from_bytes(hashlib.sha256(text.lower().encode()).digest()[:4], "big") % buckets


def is_held_out_word(word: str) -> bool:
    return bucket("word " + word, 8) == 0


def is_held_out_phrase(phrase: str) -> bool:
    return bucket("phrase " + phrase, 10) == 0


ROLES = (
    "teacher farmer boy girl baker driver woman man student child gardener doctor king coach"
).split()
RELATIVES = (
    "brother sister friend uncle aunt mother father son daughter neighbor boss cousin".split()
)
ADJECTIVES = (
    "red blue old new small big wooden sweet fresh shiny broken cheap golden empty"
).split()
OPENERS = (
    "Hey, |Hi, |So, |Ok, |Quick question: |Question: |Well, |Please: |"
    "I wonder: |Tell me: |Now: |Next: |"
    "Quickly: |My question is: |Excuse me, |Hello, "
).split("|")
CLOSERS = ", please|, thanks| please| for me|, ok| thanks| - thank you|, quickly".split("|")


class Person(NamedTuple):
    name: str
    she: str
    her: str


class Source:
    """Draws words and phrasings for one item, from trained or held-out ones."""

    def __init__(self, rng: random.Random, entities: bool, phrasings: bool) -> None:
        """Draw held-out words if `entities`, and held-out phrasings if `phrasings`."""
        self.rng, self.entities, self.phrasings = rng, entities, phrasings
        self.lower = False
        self.used_held_out_phrase = False
        self.drawn: set[str] = set()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def phrase(self, options: str | Sequence[str]) -> str:
        """Return one of the phrasings, given as a sequence or separated by bars."""
        texts = options.split("|") if isinstance(options, str) else list(options)
        trained = [t for t in texts if not is_held_out_phrase(t)]
        held = [t for t in texts if is_held_out_phrase(t)]
        if self.phrasings and held:
            self.used_held_out_phrase = True
            return self.rng.choice(held)
        return self.rng.choice(trained or texts)

    def word_of(self, words: Sequence[str]) -> str:
        """Return one of the words of a list; a list too short for a split is used whole."""
        allowed = [w for w in words if is_held_out_word(w) == self.entities] or list(words)
        return self.rng.choice(allowed)

    def invented(self, syllables: int = 0) -> str:
        """Return a word that does not exist."""
        rng = self.rng
        while True:
            parts = []
            for _ in range(syllables or rng.choice([1, 1, 2, 2, 2, 2, 2, 3])):
                parts.append(rng.choice(ONSETS) if rng.random() < 0.9 else "")
                parts.append(rng.choice(VOWELS))
                parts.append(rng.choice(CODAS) if rng.random() < 0.4 else "")
            word = "".join(parts)
            if rng.random() < 0.06:
                word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
            if 3 <= len(word) <= 11 and is_held_out_word(word) == self.entities:
                return word

    def _entity(self, words: Sequence[str], share: float, ending: str = "") -> str:
        capital = words[0][0].isupper()
        for _ in range(99):
            word = self.word_of(words) if self.chance(share) else self.invented() + ending
            word = word.capitalize() if capital else word
            if word.lower() not in {w.lower() for w in self.drawn}:
                break
        word = word.lower() if self.lower else word
        self.drawn.add(word)
        return word

    def name(self) -> str:
        return self._entity(FIRST, 0.4)

    def full_name(self) -> str:
        return f"{self.name()} {self._entity(SURNAMES, 0.3)}" if self.chance(0.4) else self.name()

    def person(self) -> Person:
        """Return a person, usually with a name, else I, we, or a role."""
        kind = self.rng.random()
        if kind < 0.12:
            word, her = self.rng.choice([("I", "me"), ("I", "me"), ("we", "us")])
            return Person(word, word, her)
        if kind < 0.22:
            she = self.chance(0.5)
            word = self.rng.choice([f"the {self.word_of(ROLES)}", f"my {self.word_of(RELATIVES)}"])
            return Person(word, "she" if she else "he", "her" if she else "him")
        name = self.name()
        if kind < 0.26:
            name = self.rng.choice(["Mr. ", "Mrs. ", "my friend "]) + name
        last = name.split()[-1].capitalize()
        she = last in SHE if last in FIRST else self.chance(0.5)
        return Person(name, "she" if she else "he", "her" if she else "him")

    def city(self) -> str:
        return self._entity(CITIES, 0.4)

    def job(self) -> str:
        return self._entity(JOBS, 0.6)

    def thing(self) -> str:
        thing = self._entity(THINGS, 0.5, "s")
        return f"{self.rng.choice(ADJECTIVES)} {thing}" if self.chance(0.08) else thing

    def plain_word(self, share: float = 0.4) -> str:
        """Return a word in lower case that is not an entity: it is the question's content."""
        words = THINGS if self.chance(0.2) else COMMON
        return self.word_of(words) if self.chance(share) else self.invented()

    def key(self, question: str) -> str:
        """Return the question in lower case with names and things blanked."""
        for word in sorted(self.drawn, key=len, reverse=True):
            blank = " ".join("_" for _ in word.split())
            question = re.sub(rf"\b{re.escape(word)}\b", blank, question, flags=re.IGNORECASE)
        return question.lower()

    def item(self, task: str, question: str, answer: str, **rest: object) -> Item:
        """Return the finished item; its question is in lower case if this source is."""
        key = self.key(question)
        return Item(task, question.lower() if self.lower else question, answer, key, **rest)  # type: ignore[arg-type]
