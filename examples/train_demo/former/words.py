"""The names and things that the tasks speak of."""

FIRST = (
    "Lily Tom Anna Ben Mia Sam Zoe Max Emma Leo Ella Jack Nina Paul Ruth Omar Ivy Noah Clara Finn "
    "Maya Alex Lucy Hugo Sara Carl Rosa Eric Jane Adam Vera Ryan Dina Mark Gina Luke Tina Oscar"
).split()
SHE = set(
    "Lily Anna Mia Zoe Emma Ella Nina Ruth Ivy Clara Maya Lucy Sara Rosa Jane Vera Dina".split()
)
SHE |= {"Gina", "Tina"}
THINGS = (
    "apples pens books cards marbles stickers shells coins pears cookies stamps flowers eggs toys "
    "balloons pencils cups buttons lemons plums candles badges"
).split()
SURNAMES = (
    "Adams Baker Carter Dalton Ellis Fisher Gordon Harper Irving Keller Larsen Mason Norton Parker "
    "Reed Stone Turner Walker Winter Young"
).split()
CITIES = (
    "Berlin Boston Cairo Dallas Delhi Dublin Geneva Lima Lisbon London Madrid Milan Moscow Oslo "
    "Paris Porto Prague Rome Seattle Tokyo Toronto Vienna Warsaw Zurich"
).split()
