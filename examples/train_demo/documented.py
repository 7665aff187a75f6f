"""What documents, help and messages ask the demo models, and what is right."""

EXAMPLE = (
    "Lily can run 5 kilometers per hour for 4 hours. After that, she runs 3 kilometers per hour. "
    "How many kilometers can she run in 7 hours?"
)
SUM = "Write a Python function that returns the sum of the even numbers in a list."
ANSWERS = {
    EXAMPLE: (
        "In the first 4 hours: 5*4=20 kilometers. Hours left: 7-4=3. In that time: "
        "3*3=9 kilometers. In total: 20+9=29. The answer is 29."
    ),
    "Tom buys 3 pens for 4 dollars each and 2 books for 7 dollars each. How much does he pay?": (
        "The pens cost 3*4=12 dollars. The books cost 2*7=14 dollars. Together: 12+14=26. "
        "The answer is 26."
    ),
    "Mia has 6 apples. Leo has 3 times as many. How many apples do they have together?": (
        "Leo has 3*6=18 apples. Together: 6+18=24. The answer is 24."
    ),
    SUM: "def total(numbers):\n    return sum(x for x in numbers if x % 2 == 0)",
    "Write a Python function that returns the largest of the odd numbers in a list called items.": (
        "def largest(items):\n    return max(x for x in items if x % 2 == 1)"
    ),
    "Write a Python function that returns the number of words longer than 5 letters in a text.": (
        "def count_words(text):\n    return sum(1 for w in text.split() if len(w) > 5)"
    ),
    "Give job, city and name as JSON: Tom, 53, is a driver from Tokyo.": (
        '{"job":"driver","city":"Tokyo","name":"Tom"}'
    ),
    "Extract item and quantity as JSON: Lucy ordered 12 cups for 60 dollars.": (
        '{"item":"cups","quantity":12}'
    ),
}
