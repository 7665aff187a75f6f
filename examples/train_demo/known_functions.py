"""Well-known functions: their arguments and bodies, and how questions name them."""

KNOWN = {  # name: arguments, body, what follows "a function that", what follows "a function to"
    "reverse": (
        "text",
        "return text[::-1]",
        "reverses a string|returns a string backwards|turns a text around",
        "reverse a string|turn a text around|flip a string",
    ),
    "is_even": (
        "n",
        "return n % 2 == 0",
        "checks whether a number is even|tells if a number is even|returns whether n is even",
        "check if a number is even|test whether a number is even|find out if n is even",
    ),
    "is_odd": (
        "n",
        "return n % 2 == 1",
        "checks whether a number is odd|tells if a number is odd|returns whether n is odd",
        "check if a number is odd|test whether a number is odd|find out if n is odd",
    ),
    "add": (
        "a, b",
        "return a + b",
        "adds two numbers|returns the sum of two numbers|sums a and b",
        "add two numbers|get the sum of two numbers|sum two values",
    ),
    "subtract": (
        "a, b",
        "return a - b",
        "subtracts two numbers|returns the difference of two numbers|subtracts b from a",
        "subtract two numbers|get the difference of two numbers|subtract b from a",
    ),
    "multiply": (
        "a, b",
        "return a * b",
        "multiplies two numbers|returns the product of two numbers|multiplies a and b",
        "multiply two numbers|get the product of two numbers|multiply a by b",
    ),
    "divide": (
        "a, b",
        "return a / b",
        "divides two numbers|returns the quotient of two numbers|divides a by b",
        "divide two numbers|get the quotient of two numbers|divide a by b",
    ),
    "power": (
        "a, b",
        "return a ** b",
        "raises a to the power of b|returns a to the power b|computes a power",
        "raise a number to a power|compute a power|get a to the power of b",
    ),
    "maximum": (
        "a, b",
        "return a if a > b else b",
        "returns the larger of two numbers|finds the bigger of two numbers|"
        "returns the maximum of two numbers",
        "find the larger of two numbers|get the bigger of two numbers|"
        "return the maximum of two numbers",
    ),
    "minimum": (
        "a, b",
        "return a if a < b else b",
        "returns the smaller of two numbers|finds the lesser of two numbers|"
        "returns the minimum of two numbers",
        "find the smaller of two numbers|get the lesser of two numbers|"
        "return the minimum of two numbers",
    ),
    "square": (
        "x",
        "return x * x",
        "squares a number|returns the square of a number|returns x squared",
        "square a number|compute the square of a number|get x squared",
    ),
    "cube": (
        "x",
        "return x * x * x",
        "returns the cube of a number|cubes a number|computes the third power of x",
        "compute the cube of a number|cube a number|get the third power of x",
    ),
    "double": (
        "x",
        "return 2 * x",
        "doubles a number|returns twice a number|returns two times x",
        "double a number|get twice a number|multiply a number by two",
    ),
    "half": (
        "x",
        "return x / 2",
        "halves a number|returns half of a number|divides a number by two",
        "halve a number|get half of a number|divide a number by two",
    ),
    "factorial": (
        "n",
        "return 1 if n < 2 else n * factorial(n - 1)",
        "returns the factorial of a number|computes the factorial of n|calculates a factorial",
        "compute the factorial of a number|calculate n factorial|get a factorial",
    ),
    "fibonacci": (
        "n",
        "return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
        "returns the nth Fibonacci number|computes Fibonacci numbers|"
        "calculates the Fibonacci sequence",
        "compute Fibonacci numbers|get the nth Fibonacci number|calculate fibonacci",
    ),
    "is_palindrome": (
        "text",
        "return text == text[::-1]",
        "checks whether a text is a palindrome|tells if a word is a palindrome|"
        "tests for palindromes",
        "check if a string is a palindrome|test for a palindrome|"
        "find out whether a word is a palindrome",
    ),
    "count_vowels": (
        "text",
        "return sum(1 for c in text if c in 'aeiou')",
        "counts the vowels in a string|returns the number of vowels in a text|"
        "tells how many vowels a word has",
        "count the vowels in a string|count vowels|get the number of vowels in a text",
    ),
    "upper": (
        "text",
        "return text.upper()",
        "turns a string into upper case|returns a text in capital letters|"
        "converts a text to uppercase",
        "convert a string to uppercase|make a text upper case|capitalize all letters of a string",
    ),
    "lower": (
        "text",
        "return text.lower()",
        "turns a string into lower case|returns a text in small letters|"
        "converts a text to lowercase",
        "convert a string to lowercase|make a text lower case|lowercase a string",
    ),
    "count_words": (
        "text",
        "return len(text.split())",
        "counts the words in a text|returns the number of words in a string|"
        "tells how many words a sentence has",
        "count the words in a sentence|count words|get the number of words in a text",
    ),
    "first": (
        "values",
        "return values[0]",
        "returns the first element of a list|gives the first item of a list|gets the first value",
        "get the first element of a list|return the first item|pick the first value of a list",
    ),
    "last": (
        "values",
        "return values[-1]",
        "returns the last element of a list|gives the last item of a list|gets the last value",
        "get the last element of a list|return the last item|pick the last value of a list",
    ),
    "average": (
        "numbers",
        "return sum(numbers) / len(numbers)",
        "returns the average of a list|computes the mean of the numbers|"
        "calculates the average of a list of numbers",
        "compute the average of a list|calculate the mean of a list|"
        "get the average of some numbers",
    ),
    "is_positive": (
        "n",
        "return n > 0",
        "checks whether a number is positive|tells if n is greater than zero|"
        "returns whether a number is positive",
        "check if a number is positive|test whether n is above zero|see if a number is positive",
    ),
    "is_empty": (
        "values",
        "return len(values) == 0",
        "checks whether a list is empty|tells if a list is empty|"
        "returns whether there are no values",
        "check if a list is empty|test whether a list has no elements|see if a list is empty",
    ),
    "absolute": (
        "x",
        "return abs(x)",
        "returns the absolute value of a number|gives the absolute value of x|"
        "computes an absolute value",
        "get the absolute value of a number|compute the absolute value|"
        "return the absolute value of x",
    ),
    "reverse_list": (
        "values",
        "return values[::-1]",
        "reverses a list|returns a list in reverse order|turns a list around",
        "reverse a list|turn a list around|flip the order of a list",
    ),
    "join": (
        "words",
        "return ' '.join(words)",
        "joins words with spaces|joins a list of words into a text|"
        "makes one string of a list of words",
        "join words with spaces|join a list of words|make one string of many words",
    ),
    "merge": (
        "a, b",
        "return a + b",
        "merges two lists|joins two lists|returns two lists as one",
        "merge two lists|join two lists|put two lists together",
    ),
}
