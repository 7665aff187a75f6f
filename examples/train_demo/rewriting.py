"""Rewriting: reverse, sort, spell, repeat, pick out, and fill a gap."""

from examples.train_demo.words import Item, Source

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
LETTERS = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z".split()
FACTS = (
    "A [dog] barks.|A [cat] meows.|The opposite of hot is [cold].|The opposite of big is [small].|"
    "The opposite of day is [night].|The opposite of left is [right].|"
    "The opposite of up is [down].|"
    "The opposite of fast is [slow].|The opposite of old is [new].|"
    "The opposite of black is [white].|"
    "A week has [7] days.|A year has [12] months.|A day has [24] hours.|An hour has [60] minutes.|"
    "A minute has [60] seconds.|A spider has [8] legs.|"
    "A triangle has [3] sides.|A dog has [4] legs.|"
    "A bird has [2] wings.|A square has [4] sides.|The sun rises in the [east].|Snow is [white].|"
    "Grass is [green].|The sky is [blue].|Bees make [honey].|Cows give [milk].|Hens lay [eggs].|"
    "Ice is frozen [water].|We see with our [eyes].|We hear with our [ears].|Fish live in [water].|"
    "We read [books].|Bread is made from [flour].|"
    "A baby cat is a [kitten].|A baby dog is a [puppy].|"
    "You sleep in a [bed].|You sit on a [chair].|The king and the [queen] live in a castle."
).split("|")


def some_words(s: Source, low: int, high: int) -> list[str]:
    words: list[str] = []
    count, share = s.rng.randint(low, high), s.rng.choice([0.0, 0.5, 1.0])
    while len(words) < count:
        word = s.plain_word(share)
        if word not in words:
            words.append(word)
    return words


def _listed(s: Source, words: list[str]) -> str:
    if len(words) > 1 and s.chance(0.15):
        return ", ".join(words[:-1]) + " and " + words[-1]
    return s.rng.choice([", ", ", ", " "]).join(words)


def _reverse(s: Source) -> Item:
    words = some_words(s, 2, 6)
    if s.chance(0.15):  # often sorted, so that reversing is not confused with sorting
        numbers = some_numbers(s)
        words = [str(n) for n in (sorted(numbers) if s.chance(0.5) else numbers)]
    ask = s.phrase(
        "Reverse the list: {}|Reverse these words: {}|Reverse: {}|"
        "Write these words in reverse order: {}|"
        "Put these words in reverse order: {}.|Turn this list around: {}|"
        "Say these words backwards: {}|"
        "Reverse the order of {}.|Please reverse this list of words: {}|"
        "List these from last to first: {}|"
        "Can you reverse the words {}?|"
        "Give me this list in the opposite order: {}|Flip the order: {}|"
        "What is {} in reverse order?|Start with the last word: {}|"
        "Write backwards, word by word: {}|"
        "Invert the order of these words: {}|Mirror this list: {}|"
        "{} backwards, please|Give {} back in reverse.|Flip this list: {}|"
        "Take these words and reverse their order: {}|"
        "Write the list from the end to the beginning: {}|Here are some words: {}. Reverse them.|"
        "{} - now the other way round|I have these words: {}. Put them in the opposite order.|"
        "The words are {}. Say them from the last to the first.|How does {} read backwards?|"
        "Order reversed: {}|Reverse {}|Swap the order around: {}|"
        "Read this list from back to front: {}|List in reverse: {}|Words in reverse order: {}|"
        "Reverse the words {}."
    )
    return s.item("rewriting", ask.format(_listed(s, words)), ", ".join(words[::-1]))


def some_numbers(s: Source) -> list[int]:
    top = s.rng.choice([20, 100, 100, 199])
    return s.rng.sample(range(1, top + 1), s.rng.randint(3, 6))


def _sort(s: Source) -> Item:
    numbers, down = some_numbers(s), s.chance(0.4)
    listed = _listed(s, [str(n) for n in numbers])
    up_words = (
        "Sort these numbers: {}|Sort: {}|Sort the numbers {}.|Put these numbers in order: {}|"
        "Sort in ascending order: {}|Order these numbers from smallest to largest: {}|"
        "Arrange {} from low to high.|Sort {} ascending.|Put {} in increasing order.|"
        "List these numbers from small to big: {}|Write the numbers {} in order.|"
        "Please sort these numbers: {}|Can you sort {}?|Bring these numbers into order: {}|"
        "Which order is right for {}, smallest first?|Rank from least to greatest: {}|"
        "Here are some numbers: {}. Sort them.|I have {}. Put them in order.|"
        "Numbers: {}. Smallest first, please.|{} sorted, please|{} from small to large|"
        "What is {} in ascending order?|What is the right order of {}?|"
        "Sort this list of numbers: {}|Order {} by size.|"
        "Arrange these numbers in increasing order: {}|Start with the smallest: {}|"
        "Put the smallest first: {}|Line up {} from lowest to highest.|Give me {} in sorted order.|"
        "Sort from least to greatest: {}|Sort low to high: {}|Ascending: {}|"
        "These numbers are mixed up: {}. Sort them.|Write {} from the smallest to the biggest.|"
        "Sort the list {}"
    )
    down_words = (
        "Sort in descending order: {}|Order these numbers from largest to smallest: {}|"
        "Arrange {} from high to low.|Sort {} descending.|Put {} in decreasing order.|"
        "List these numbers from big to small: {}|Sort these numbers, largest first: {}|"
        "Sort backwards: {}|Rank from greatest to least: {}|Put the biggest first: {}|"
        "Order from highest to lowest: {}|Sort the numbers {} in descending order.|"
        "Here are some numbers: {}. Sort them from big to small.|"
        "Numbers: {}. Largest first, please.|{} from large to small|"
        "What is {} in descending order?|Sort high to low: {}|Descending: {}|"
        "Start with the largest: {}|Line up {} from highest to lowest.|"
        "Write {} from the biggest to the smallest.|Sort this list from high to low: {}|"
        "Order {} by size, biggest first.|Give me {} with the largest first.|"
        "Arrange these numbers in decreasing order: {}"
    )
    ask = s.phrase(down_words if down else up_words)
    ordered = sorted(numbers, reverse=down)
    return s.item("rewriting", ask.format(listed), ", ".join(map(str, ordered)))


def _extreme(s: Source) -> Item:
    numbers, largest = some_numbers(s), s.chance(0.5)
    words = s.phrase("largest|biggest|highest|greatest" if largest else "smallest|lowest|least")
    ask = s.phrase(
        "What is the {w} of {l}?|Which number is the {w}: {l}?|Find the {w} number: {l}|"
        "Which of {l} is the {w}?|Give me the {w} of these numbers: {l}|The {w} of {l}?|"
        "Tell me the {w} number in {l}.|Pick the {w} number: {l}|"
        "{l}: which is the {w}?|Which one is the {w}, {l}?|From {l}, pick the {w}.|"
        "Out of {l}, which is the {w}?|Here are numbers: {l}. Which is the {w}?|"
        "The {w} number of {l}|Name the {w} number: {l}|Say which number is the {w}: {l}|"
        "Choose the {w} of {l}.|Look at {l}. What is the {w}?"
    )
    listed = ", ".join(map(str, numbers))
    value = max(numbers) if largest else min(numbers)
    return s.item("rewriting", ask.format(w=words, l=listed), str(value))


def _spell(s: Source) -> Item:
    word = s.plain_word(0.5)
    if s.chance(0.2):
        word = s.rng.choice([s.name, s.city])()
    ask = s.phrase(
        "Spell {}.|Spell the word {}.|How do you spell {}?|How is {} spelled?|Can you spell {}?|"
        "Spell {} letter by letter.|What are the letters of {}?|Please spell {} for me.|"
        "Write {} letter by letter.|List the letters in {}.|Give me the spelling of {}.|"
        "What letters is the word {} made of?|Take {} apart into letters.|"
        "{}, letter by letter|Give the letters of {}.|Which letters are in {}?|"
        "What is the spelling of {}?|Show how {} is spelled.|Spell out {}.|Spell out the word {}.|"
        "Split {} into letters.|Separate the letters of {}.|Tell me how to spell {}.|"
        "How to spell {}?|Say the letters of {} one by one.|"
        "Write {} with dashes between the letters.|I do not know how to spell {}.|"
        "The word is {}. Spell it.|Break {} into its letters."
    )
    mark = s.rng.choice(["", "", '"'])
    return s.item("rewriting", ask.format(f"{mark}{word}{mark}"), "-".join(word))


def _repeat(s: Source) -> Item:
    words = " ".join(some_words(s, 1, 6))
    ask = s.phrase(
        "Repeat: {}|Say {}.|Repeat after me: {}|Repeat these words: {}|"
        "Copy this: {}|Write down: {}|"
        "Please repeat {}.|Echo {}|Type the words {}.|Say this again: {}|Can you repeat {}?|"
        "Just say {}.|Output exactly this: {}|Write {} and nothing else.|"
        "Say the following: {}|Write the following words: {}|Tell me: {}|Return the text {}|"
        "Give back: {}|Answer only with: {}|Say exactly: {}|I say {} and you say the same.|"
        "Print {}|Copy these words: {}|Repeat the following: {}|Reply with {}|Write exactly: {}|"
        "Repeat {}"
    )
    return s.item("rewriting", ask.format(words), words)


def _nth(s: Source) -> Item:
    words = some_words(s, 3, 6)
    place = s.rng.choice([0, 1, 2, -1])
    which = {0: "first", 1: "second", 2: "third", -1: "last"}[place]
    ask = s.phrase(
        "What is the {w} word of {l}?|Which word comes {w}: {l}|Give me the {w} word: {l}|"
        "The {w} of these words: {l}|Tell me the {w} word in this list: {l}|"
        "Pick the {w} word of {l}.|"
        "Say the {w} word of {l}.|Which word is {w} in {l}?|"
        "{l}: which word is {w}?|In {l}, what is the {w} word?|Of {l}, give me the {w}.|"
        "Which one is {w}: {l}|Here are words: {l}. Which is the {w}?|Name the {w} word of {l}.|"
        "Choose the {w} word: {l}|What comes {w} in {l}?|The {w} of {l}, please|"
        "Write only the {w} word: {l}|What is the {w} item in {l}?"
    )
    return s.item("rewriting", ask.format(w=which, l=_listed(s, words)), words[place])


def series(s: Source, gap: str) -> tuple[str, str]:
    """Return a series with a gap, and the whole series."""
    if s.chance(0.3):
        run = s.rng.choice([DAYS, MONTHS, LETTERS])
    else:
        step = s.rng.choice([1, 1, 2, 2, 3, 4, 5, 10, 20])
        first = s.rng.choice([step, s.rng.randint(1, 40)])
        run = [str(first + step * i) for i in range(8)]
    size = s.rng.randint(4, min(6, len(run)))
    start_at = s.rng.randint(0, len(run) - size)
    part = run[start_at : start_at + size]
    hidden = s.rng.randrange(1, size)
    return ", ".join(gap if i == hidden else w for i, w in enumerate(part)), ", ".join(part)


def _gap(s: Source) -> Item:
    gap = s.rng.choice(["___", "__", "...", "_", "[gap]", "____"])
    if s.chance(0.35):
        fact = s.rng.choice(FACTS)
        start, rest = fact.split("[")
        _, end = rest.split("]")
        text, answer = start + gap + end, fact.replace("[", "").replace("]", "")
    else:
        text, answer = series(s, gap)
        if s.lower:
            answer = answer.lower()
    ask = s.phrase(
        "Fill the gap: {}|Fill in the gap: {}|Complete: {}|What is missing? {}|"
        "Fill in the blank: {}|"
        "What belongs in the gap? {}|Complete this: {}|Fill the blank: {}|Replace the gap: {}|"
        "Put the right word into the gap: {}|Which one is missing: {}|"
        "{} - what is missing?|What goes into the gap? {}|Find the missing part: {}|"
        "Something is missing here: {}|Fill it in: {}|Write this without the gap: {}|"
        "Please fill the gap in {}|Put in what is missing: {}|Which part is missing? {}"
    )
    return s.item("rewriting", ask.format(text), answer)


def rewriting(s: Source) -> Item:
    makers = [_reverse, _reverse, _sort, _sort, _extreme, _spell, _spell, _repeat, _nth, _gap]
    return s.rng.choice(makers)(s)
