"""Whatever the demo cannot do, and the one sentence that says so.

Prompts are put together from word lists: questions about the world, chat, requests for texts and
programs, other languages, gibberish, and near misses of the tasks it knows.
"""

from collections.abc import Callable

from examples.train_demo.arithmetic import SIGNS
from examples.train_demo.json_extraction import _event, _order, _person, _pet, _trip
from examples.train_demo.words import COMMON, JOBS, THINGS, Item, Source

ANSWER = (
    "I only know arithmetic like 7*8, word problems, small Python functions, JSON from a sentence, "
    "and sorting, reversing or spelling words."
)

COUNTRIES = (
    "France Germany Italy Spain Japan China India Brazil Canada Mexico "
    "Egypt Kenya Norway Sweden Poland Greece Turkey Peru Chile "
    "Argentina Australia Portugal Austria Belgium Denmark Finland Hungary "
    "Iceland Ireland Morocco Nigeria Russia Ukraine Vietnam "
    "Thailand Korea Cuba Iran Iraq Nepal Mongolia Ethiopia Ghana Jamaica"
).split()
TOPICS = (
    "love|war|peace|friendship|the moon|black holes|gravity|photosynthesis|"
    "evolution|democracy|the Roman empire|the French revolution|"
    "quantum physics|climate change|machine learning|"
    "artificial intelligence|neural networks|transformers|diffusion models|"
    "inflation|the stock market|"
    "football|tennis|chess|cooking|gardening|yoga|meditation|jazz|"
    "classical music|Shakespeare|Mozart|Picasso|Einstein|Napoleon|"
    "dinosaurs|whales|volcanoes|"
    "earthquakes|the ocean|the desert|vaccines|viruses|DNA|the human brain|"
    "sleep|dreams|happiness|time travel|robots|space travel|Mars|"
    "electric cars|"
    "blockchain|bitcoin|the internet|social media|privacy|open source|"
    "Linux|Kubernetes|databases|tax law|marriage|childhood|grammar|"
    "philosophy|religion|"
    "economics|history|poetry|fashion|the weather|a good breakfast|"
    "healthy food|my dog|your favorite book|life on other planets|"
    "the meaning of life|"
    "tea and coffee|trains|bridges|castles|pirates|dragons|winter|"
    "autumn leaves|the sea|old friends|a lost key|a brave knight|"
    "two robots|a clever fox"
).split("|")
FAMOUS = (
    "Einstein|Mozart|Napoleon|Cleopatra|Shakespeare|Picasso|Marie Curie|"
    "Isaac Newton|Leonardo da Vinci|Beethoven|Gandhi|Darwin|Plato|Socrates|"
    "the president|the pope|the king of Spain|"
    "the inventor of the telephone|the first man on the moon|"
    "the author of Hamlet|Julius Caesar|Ada Lovelace|Alan Turing"
).split("|")
NOUNS = (
    "capital|population|currency|flag|history|language|president|climate|"
    "area|anthem|largest city|longest river|highest mountain|national dish|"
    "economy"
).split("|")
LANGUAGES = (
    "French German Spanish Italian Japanese Chinese Russian Latin Arabic "
    "Portuguese Dutch Polish Swedish Korean Hindi Greek"
).split()
PROGRAMS = (
    "Java Rust JavaScript Go C++ Haskell Ruby Kotlin SQL Bash HTML CSS "
    "Perl Swift PHP Scala Lua assembler"
).split()
TEXTS = (
    "poem|story|song|joke|letter|email|speech|essay|haiku|limerick|summary|"
    "blog post|tweet|recipe|review|report|cover letter|fairy tale|rap|"
    "riddle|"
    "headline|novel|diary entry|dialogue|proverb|love letter|birthday card|"
    "press release|slogan|lullaby"
).split("|")
DEEDS = (
    "download a web page|send an email|train a neural network|read a file|"
    "open a database|parse XML|draw a circle|play a sound|"
    "sort a dictionary by value|"
    "connect to a server|resize an image|make a web server|scrape a site|"
    "implement quicksort|build a linked list|solve sudoku|invert a matrix|"
    "encrypt a password|"
    "start a thread|mock a class|write a decorator|plot a graph|"
    "format a date|read a csv file|balance a binary tree|"
    "find a shortest path|compress a folder|"
    "translate a text|record the screen|control a robot|play chess|"
    "render a triangle|query an API|log to a file|parse arguments|"
    "deploy with docker"
).split("|")
CHORES = (
    "fix my bike|bake a cake|tie a tie|learn to swim|lose weight|"
    "sleep better|make coffee|write a book|start a company|learn French|"
    "play guitar|save money|"
    "build a house|repair a phone|find a job|make friends|grow tomatoes|"
    "clean a window|cook rice|boil an egg|train a dog|stop smoking|"
    "plan a trip|buy a car|"
    "change a tire|knit a scarf|meditate|run a marathon|draw a cat|"
    "install Linux|reset my password|cancel my order|book a flight|"
    "call a taxi"
).split("|")
CHAT = (
    "hi|hello|hey|Hello there|Hi!|Good morning|Good evening|How are you?|"
    "How are you doing today?|What's up?|Who are you?|What are you?|"
    "What is your name?|"
    "What can you do?|Help|help me|Can you help me?|Are you human?|"
    "Are you a robot?|Do you like music?|Do you dream?|Thank you|Thanks!|"
    "Bye|Goodbye|See you|"
    "I am bored|I am tired.|I love you|I hate this|You are stupid|"
    "You are great!|Tell me a joke|Tell me a story|Tell me something|"
    "Sing a song|Say something funny|"
    "What time is it?|What day is today?|Where am I?|Where do you live?|"
    "How old are you?|Who made you?|Do you speak French?|Why?|Why not?|"
    "What?|Who?|Where?|When?|"
    "ok|okay|yes|no|maybe|lol|hm|hmm|test|testing|foo|foo bar|?|!|...|.|"
    "asdf|qwerty|aaa|xyz|abc|Nice to meet you|Let's talk|Please|Sorry|Stop|"
    "Continue|Go on|"
    "Start|Next|More|Again|Who won the game?|Are you there?|"
    "Is anybody there?|What should I do?|I need advice|I feel sad today|"
    "My head hurts|I lost my keys|"
    "Give me an idea|Surprise me|What's new?|Good night|How do you work?|"
    "What is your favorite color?|Can you sing?|Do you know me?|"
    "Am I right?|Guess what"
).split("|")
FOREIGN = (
    "Bonjour, comment allez-vous?|Quelle heure est-il?|Je m'appelle Marie.|"
    "O\u00f9 est la gare?|Parlez-vous anglais?|Racontez une histoire.|"
    "Je ne comprends pas.|"
    "Guten Tag, wie geht es dir?|Was ist die Hauptstadt von Frankreich?|"
    "Wie alt bist du?|Ich habe eine Frage.|Erz\u00e4hl mir einen Witz.|"
    "Wo ist der Bahnhof?|Das Wetter ist sch\u00f6n.|"
    "Hola, \u00bfc\u00f3mo est\u00e1s?|"
    "\u00bfD\u00f3nde est\u00e1 la biblioteca?|\u00bfQu\u00e9 hora es?|"
    "Me llamo Juan.|Cu\u00e9ntame un chiste.|No entiendo nada.|"
    "Buenos d\u00edas|Hasta luego|"
    "Ciao, come stai?|Dove si trova la stazione?|Mi chiamo Anna.|"
    "Che tempo fa oggi?|Buongiorno a tutti|Ol\u00e1, tudo bem?|"
    "Qual \u00e9 o seu nome?|Eu n\u00e3o falo ingl\u00eas.|"
    "Hallo, hoe gaat het?|Waar woon je?|Hej, hur m\u00e5r du?|"
    "Jag heter Lars.|Dzie\u0144 dobry|Jak si\u0119 masz?|"
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a "
    "\u0434\u0435\u043b\u0430?|"
    "\u041a\u0430\u043a \u0442\u0435\u0431\u044f "
    "\u0437\u043e\u0432\u0443\u0442?|"
    "\u4f60\u597d|\u4f60\u53eb\u4ec0\u4e48\u540d\u5b57?|"
    "\u3053\u3093\u306b\u3061\u306f|\u304a\u5143\u6c17\u3067\u3059\u304b|"
    "\uc548\ub155\ud558\uc138\uc694|\u0645\u0631\u062d\u0628\u0627|"
    "\u03ba\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1|Salve, quid agis?|"
    "Merhaba, nas\u0131ls\u0131n?|Hei, mit\u00e4 kuuluu?"
).split("|")
ADJECTIVES = (
    "good bad funny short long sad famous interesting cheap expensive "
    "beautiful simple scary strange modern old healthy quick"
).split()
PROPERTIES = (
    "big|heavy|old|far|deep|tall|fast|long|expensive|dangerous|hot|cold|"
    "popular|common|important|clever|loud|rare"
).split("|")
STATEMENTS = (
    "The {n} is {a}.|I saw a {n} yesterday.|My {n} is broken.|"
    "I think that {t} is {a}.|We talked about {t}.|"
    "The {n} and the {m} are {a}.|Nobody likes {t}.|"
    "Yesterday I went to {c}.|I live in {c}.|I work as a {j}.|"
    "A {n} sat on a {m}.|She gave me a {a} {n}.|They never found the {n}.|"
    "All {x} are {a}.|"
    "Once upon a time there was a {a} {n}.|I would like a {n} with {m}.|"
    "Last year {t} was {a}.|If the {n} is {a}, the {m} is too.|"
    "He likes {x}.|I dreamt of a {n}."
)
QUESTIONS = (
    "What is the {p} of {k}?|What is the {p} of {k}|"
    "Which is the {p} of {k}?|Tell me the {p} of {k}.|"
    "Do you know the {p} of {k}?|Where is {k}?|Where is {c}?|"
    "How far is {c} from {c}?|"
    "Who was {f}?|When was {f} born?|Why is {f} famous?|Tell me about {f}.|"
    "What did {f} do?|Where did {f} live?|Who is {f}|"
    "What is {t}?|Explain {t}.|Explain {t} to a child.|How does {t} work?|"
    "Why is {t} important?|Tell me about {t}.|What do you think about {t}?|"
    "What do you know about {t}?|Define {t}.|"
    "Describe {t}.|Who invented {t}?|Is {t} real?|"
    "What is the best book about {t}?|Give me a fact about {t}.|"
    "What is the history of {t}?|Compare {t} and {t}.|"
    "Why is the {n} {a}?|Why is the sky blue?|Why do {x} {v}?|"
    "Where do {x} come from?|How {q} is a {n}?|How {q} is the {n}?|"
    "What is a {n}?|What does a {n} eat?|Who owns the {n}?|"
    "What color is the {n}?|Can a {n} be {a}?|"
    "What is the difference between a {n} and a {m}?|"
    "Which is better, {n} or {m}?|Do {x} {v}?|How are {x} made?|"
    "How do {x} {v}?|"
    "How do I {h}?|How can I {h}?|Teach me to {h}.|I want to {h}.|"
    "Help me {h}.|What do I need to {h}?|Is it hard to {h}?|Can you {h}?|"
    "Please {h}.|When should I {h}?|"
    "What is the weather in {c}?|Is it raining in {c}?|"
    "What can I see in {c}?|Recommend a {a} restaurant in {c}.|"
    "Plan a weekend in {c}.|When does the train to {c} leave?|"
    "Recommend a {a} movie.|Recommend a {a} book about {t}.|"
    "What should I read?|What should I cook tonight?|"
    "Give me a recipe with {x}.|What rhymes with {n}?|"
    "What is a synonym of {a}?|"
    "How do you say {n} in {l}?|Translate {n} into {l}.|"
    "Translate to {l}: the {n} is {a}|"
    "Translate this sentence: the {n} is {a}.|What does {w} mean?|"
    "What is the meaning of {n}?|"
    "Who is {w}?|What is {w}?|Where is {w}?|Tell me about {w}.|"
    "Do you know {w}?|Explain {w}.|Why {w}?"
)
REQUESTS = (
    "Write a {a} {g} about {t}.|Write a {g} about {t}|Write a {g}.|"
    "Write me a {g} about a {n}.|Compose a {g} for my {j}.|"
    "I need a {g} about {t}.|Tell me a {a} {g}.|"
    "Can you write a {g} about {t}?|Make up a {g} with a {n} and a {m}.|"
    "Create a {g} about {c}.|Give me a {g}.|"
    "Summarize this text: the {n} is {a}.|Summarize {t}.|"
    "Finish this {g}: the {n}|"
    "Write a {P} program.|Write a {P} program to {d}.|How do I {d} in {P}?|"
    "Write a {P} function that returns a {n}.|Write {P} code to {d}.|"
    "Is {P} better than Python?|Explain {P}.|"
    "Write a Python program to {d}.|Write a Python function to {d}.|"
    "How do I {d} in Python?|Write a Python class for a {n}.|"
    "Write a Python script to {d}.|What is Python?|Fix my Python code.|"
    "Write a function to {d}.|Python code to {d}|Explain this code.|"
    "Write unit tests for my {n}.|Design a {a} logo.|Draw a {n}.|"
    "Draw a picture of {t}.|Paint a {a} {n}.|Show me a photo of a {n}.|"
    "Play some {a} music.|Open the {n}.|Close the {n}.|Turn on the {n}.|"
    "Order a {n} for me.|Call {j}.|Search for {t}.|"
    "Find a {a} {n} near {c}.|Buy {x}.|Send a {n} to {c}.|"
    "Give me ten ideas for {t}.|List some {a} {x}.|Name a {a} {n}.|"
    "List the planets.|Name three {x}.|Is a {n} {a}?|Invent a {n}.|"
    "Imagine a {n}.|Pretend to be a {j}.|Act as a {j}.|"
    "Classify the sentiment: the {n} is {a}.|"
    "Correct the grammar: {x} is {a}|"
    "Rewrite this politely: the {n} is {a}.|"
    "Make this shorter: the {n} in {c} was {a}.|Proofread my {g}."
)
VERBS = (
    "sing|fly|sleep|grow|cry|swim|dance|fall|burn|float|shine|smell|bite|"
    "hide|die|change|matter|exist|melt|break"
).split("|")


def _filled(s: Source, template: str) -> str:
    """A template with its letters replaced, each at each place anew."""
    fill: dict[str, Callable[[], str]] = {
        "p": lambda: s.word_of(NOUNS),
        "k": lambda: s.word_of(COUNTRIES) if s.chance(0.7) else s.invented().capitalize(),
        "c": s.city,
        "f": lambda: s.word_of(FAMOUS),
        "t": lambda: s.word_of(TOPICS),
        "n": lambda: s.plain_word(0.7),
        "m": lambda: s.word_of(COMMON),
        "x": lambda: s.word_of(THINGS),
        "v": lambda: s.word_of(VERBS),
        "a": lambda: s.word_of(ADJECTIVES),
        "q": lambda: s.word_of(PROPERTIES),
        "h": lambda: s.word_of(CHORES),
        "l": lambda: s.word_of(LANGUAGES),
        "w": s.invented,
        "g": lambda: s.word_of(TEXTS),
        "j": lambda: s.word_of(JOBS),
        "d": lambda: s.word_of(DEEDS),
        "P": lambda: s.word_of(PROGRAMS),
    }
    out, rest = "", template
    while "{" in rest:
        before, _, rest = rest.partition("{")
        letter, _, rest = rest.partition("}")
        word = fill[letter]()
        if letter in "kcfwnmx":
            s.drawn.add(word)
        out += before + word
    return out + rest


def _gibberish(s: Source) -> str:
    kind = s.rng.randrange(4)
    if kind == 0:
        return "".join(s.rng.choices("abcdefghijklmnopqrstuvwxyz", k=s.rng.randint(2, 14)))
    if kind == 1:
        return " ".join(s.invented() for _ in range(s.rng.randint(1, 7)))
    if kind == 2:
        return (
            "".join(
                s.rng.choices("abc !?.,;:-_#*+/()[]{}<>=&%$0123456789xyz", k=s.rng.randint(1, 16))
            ).strip()
            or "?"
        )
    return " ".join(s.plain_word(0.9) for _ in range(s.rng.randint(1, 8)))


def _near_miss(s: Source) -> str:
    """A task half said, or one that is too large for the demo."""
    kind = s.rng.randrange(8)
    if kind == 0:  # numbers that it never learnt to calculate with
        sign = s.rng.choice("+-*/")
        a, b = s.rng.randint(200, 99999), s.rng.randint(13, 9999)
        text = f"{a} {s.rng.choice([sign, SIGNS[sign][0]])} {b}"
        return s.phrase("What is {}?|{}|Calculate {}.|How much is {}?|{} = ?|What's {}?").format(
            text
        )
    if kind == 1:  # facts, and no question
        return s.rng.choice([_person, _order, _event, _pet, _trip])(s).sentence
    if kind == 2:
        return s.phrase(
            "{n} has {a} {x}.|There are {a} {x} in {c}.|{n} gives {a} {x} to {m}.|"
            "{n} buys {a} {x} for {b} dollars each.|{n} is {a} years old."
        ).format(
            n=s.name(),
            m=s.name(),
            a=s.rng.randint(2, 99),
            b=s.rng.randint(2, 12),
            x=s.thing(),
            c=s.city(),
        )
    if kind == 3:
        return s.phrase(
            "How many {x} are there in {c}?|How many people live in {c}?|"
            "How many {x} does {n} have?|How much does a {w} cost?|How old is {n}?|"
            "How tall is {n}?|Where does {n} live?|"
            "Who is {n}?|What is {n}?|When was {n} born?|"
            "How many {x} are in a {w}?|What does {n} do?|Is {n} a {j}?"
        ).format(n=s.name(), x=s.thing(), c=s.city(), w=s.plain_word(0.7), j=s.job())
    if kind == 4:
        return s.phrase(
            "What is the square root of {a}?|What is {a} percent of {b}?|"
            "Is {a} prime?|What is the factorial of {a}?|What is pi?|"
            "Convert {a} miles to kilometers.|What is {a} in binary?|"
            "Solve x + {a} = {b}|What is the sine of {a}?|Integrate x squared.|"
            "Factor {a}.|What is {a} to the power of {b}?|Round {a}.{b}|"
            "What year was {a} years ago?|Is {a} larger than {b}?|Count to {a}.|"
            "What is half of {a}?|{a}|{a} {b}|What comes after infinity?|"
            "Tell me a number|Roll a die|What is log {a}?"
        ).format(a=s.rng.randint(2, 199), b=s.rng.randint(2, 199))
    if kind == 5:
        return s.phrase(
            "What is JSON?|Explain JSON.|Give me an example of JSON.|"
            "Write a JSON schema for a {w}.|Convert this JSON to YAML.|"
            "Is JSON better than XML?|Who invented JSON?|Write XML for a {w}.|"
            "What is a function?|What is a list in Python?|Why is Python slow?|"
            "Who invented Python?|Sort my {w}.|Reverse the car.|Spell check this.|"
            "Repeat yourself.|Fill the bottle.|"
            "What is arithmetic?|What is a word problem?|Give me a word problem.|"
            "Calculate something.|Teach me math.|Explain addition.|Write a list.|"
            "Extract the {w}.|Make a table of {x}."
        ).format(w=s.plain_word(0.8), x=s.thing())
    if kind == 6:
        return s.phrase(
            "Uppercase this: {w} {v}|Count the letters in {w}.|"
            "How many letters has {w}?|Is {w} a palindrome?|What rhymes with {w}?|"
            "Sort the words {w}, {v} by length.|Give the plural of {w}.|"
            "Is {w} a word?|Make an anagram of {w}.|Encode {w} in base64.|Hash {w}."
        ).format(w=s.plain_word(0.5), v=s.plain_word(0.5))
    return _filled(s, s.phrase(STATEMENTS)) + " " + _filled(s, s.phrase(QUESTIONS))


def outside(s: Source) -> Item:
    kind = s.rng.random()
    if kind < 0.34:
        text = _filled(s, s.phrase(QUESTIONS))
    elif kind < 0.54:
        text = _filled(s, s.phrase(REQUESTS))
    elif kind < 0.62:
        text = _filled(s, s.phrase(STATEMENTS))
    elif kind < 0.70:
        text = s.word_of(CHAT)
        if s.chance(0.3):
            text = f"{text} {s.word_of(CHAT)}"
    elif kind < 0.75:
        text = s.word_of(FOREIGN)
    elif kind < 0.83:
        text = _gibberish(s)
    else:
        text = _near_miss(s)
    return s.item("outside", text, ANSWER)
