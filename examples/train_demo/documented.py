"""The questions that documents, help and messages ask the demo models, and the right answers."""

EXAMPLE = (
    "Max reads 8 pages per day for 5 days. Then he reads 10 pages per day for 2 days. "
    "How many pages does he read in total?"
)
FUNCTION = (
    "Write a Python function that returns the sum of the squares of the even numbers in a list."
)
ANSWERS = {
    EXAMPLE: ("First 8*5=40 pages. Then 10*2=20 pages. Together 40+20=60 pages. The answer is 60."),
    "Anna buys 3 pens for 4 dollars each. How much does she pay?": (
        "The pens cost 3*4=12 dollars. The answer is 12."
    ),
    "Anna has 4 cards. Ben has 3 times as many. How many cards does Ben have?": (
        "Ben has 4*3=12 cards. The answer is 12."
    ),
    "There are 7 boxes of 4 pencils. Tom sells 9 pencils. How many pencils are left?": (
        "7*4=28 pencils. 28-9=19 pencils. The answer is 19."
    ),
    "What is 12 plus 30?": "12+30=42",
    FUNCTION: "def total(numbers):\n    return sum(x * x for x in numbers if x % 2 == 0)",
    "Write a Python function that returns the largest of the odd numbers in a list called items.": (
        "def largest(items):\n    return max(x for x in items if x % 2 == 1)"
    ),
    "Write a Python function that returns the number of words longer than 5 letters in a text.": (
        "def count_words(text):\n    return sum(1 for word in text.split() if len(word) > 5)"
    ),
    "Extract item and quantity as JSON: Lucy ordered 12 cups for 60 dollars.": (
        '{"item":"cups","quantity":12}'
    ),
    "Give job and age as JSON: Tom, 53, is a driver from Tokyo.": '{"job":"driver","age":53}',
    "Give job and age as JSON: Anna, 31, is a nurse from Rome.": '{"job":"nurse","age":31}',
    "Give job, city and name as JSON: Anna, 31, is a nurse from Rome.": (
        '{"job":"nurse","city":"Rome","name":"Anna"}'
    ),
}
