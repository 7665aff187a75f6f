"""Well-known functions: their arguments and bodies, and how questions name them."""

KNOWN = {  # name: arguments, body, what follows "a function that", what follows "a function to"
    "reverse": (
        "text",
        "return text[::-1]",
        "reverses a string|returns a string backwards|turns a text around|"
        "gives back a text in reverse|flips a string|writes a string from its end",
        "reverse a string|turn a text around|flip a string|write a string backwards|"
        "get a text in reverse|reverse the characters of a string",
    ),
    "is_even": (
        "n",
        "return n % 2 == 0",
        "checks whether a number is even|tells if a number is even|returns whether n is even|"
        "says if an integer is even|is true for even numbers|tests if n is an even number",
        "check if a number is even|test whether a number is even|find out if n is even|"
        "see whether an integer is even|tell if a number is even|check n for being even",
    ),
    "is_odd": (
        "n",
        "return n % 2 == 1",
        "checks whether a number is odd|tells if a number is odd|returns whether n is odd|"
        "says if an integer is odd|is true for odd numbers|tests if n is an odd number",
        "check if a number is odd|test whether a number is odd|find out if n is odd|"
        "see whether an integer is odd|tell if a number is odd|check n for being odd",
    ),
    "add": (
        "a, b",
        "return a + b",
        "adds two numbers|returns the sum of two numbers|sums a and b|adds a and b|"
        "gives the sum of a and b|takes two numbers and adds them",
        "add two numbers|get the sum of two numbers|sum two values|add a and b|compute a plus b|"
        "calculate the sum of two values",
    ),
    "subtract": (
        "a, b",
        "return a - b",
        "subtracts two numbers|returns the difference of two numbers|subtracts b from a|"
        "gives the difference of a and b|computes a minus b|takes one number from another",
        "subtract two numbers|get the difference of two numbers|subtract b from a|"
        "compute a minus b|take one number from another|calculate the difference of a and b",
    ),
    "multiply": (
        "a, b",
        "return a * b",
        "multiplies two numbers|returns the product of two numbers|multiplies a and b|"
        "gives the product of a and b|computes a times b|takes two numbers and multiplies them",
        "multiply two numbers|get the product of two numbers|multiply a by b|compute a times b|"
        "multiply two values|calculate the product of a and b",
    ),
    "divide": (
        "a, b",
        "return a / b",
        "divides two numbers|returns the quotient of two numbers|divides a by b|"
        "gives the quotient of a and b|computes a divided by b|divides one number by another",
        "divide two numbers|get the quotient of two numbers|divide a by b|compute a divided by b|"
        "divide one number by another|calculate the quotient of a and b",
    ),
    "power": (
        "a, b",
        "return a ** b",
        "raises a to the power of b|returns a to the power b|computes a power|"
        "calculates a to the b|takes a to the power of b|gives the power of two numbers",
        "raise a number to a power|compute a power|get a to the power of b|calculate a to the b|"
        "take a to the power of b|find the power of two numbers",
    ),
    "maximum": (
        "a, b",
        "return a if a > b else b",
        "returns the larger of two numbers|finds the bigger of two numbers|"
        "returns the maximum of two numbers|tells which of two numbers is larger|"
        "gives the larger of a and b|picks the greater of two values",
        "find the larger of two numbers|get the bigger of two numbers|"
        "return the maximum of two numbers|pick the larger of a and b|"
        "choose the greater of two values|tell which of two numbers is bigger",
    ),
    "minimum": (
        "a, b",
        "return a if a < b else b",
        "returns the smaller of two numbers|finds the lesser of two numbers|"
        "returns the minimum of two numbers|tells which of two numbers is smaller|"
        "gives the smaller of a and b|picks the lower of two values",
        "find the smaller of two numbers|get the lesser of two numbers|"
        "return the minimum of two numbers|pick the smaller of a and b|"
        "choose the lower of two values|tell which of two numbers is less",
    ),
    "square": (
        "x",
        "return x * x",
        "squares a number|returns the square of a number|returns x squared|"
        "multiplies a number by itself|gives x times x|calculates the square of x",
        "square a number|compute the square of a number|get x squared|multiply a number by itself|"
        "calculate x times x|find the square of x",
    ),
    "cube": (
        "x",
        "return x * x * x",
        "returns the cube of a number|cubes a number|computes the third power of x|"
        "calculates x cubed|gives the third power of a number|takes the cube of x",
        "compute the cube of a number|cube a number|get the third power of x|calculate x cubed|"
        "take the third power of a number|find the cube of x",
    ),
    "double": (
        "x",
        "return 2 * x",
        "doubles a number|returns twice a number|returns two times x|multiplies a number by two|"
        "gives the double of x|makes a number twice as large",
        "double a number|get twice a number|multiply a number by two|make a number twice as large|"
        "calculate the double of x|take a number times two",
    ),
    "half": (
        "x",
        "return x / 2",
        "halves a number|returns half of a number|divides a number by two|gives the half of x|"
        "calculates half of a number|makes a number half as large",
        "halve a number|get half of a number|divide a number by two|calculate the half of x|"
        "make a number half as large|find half of x",
    ),
    "factorial": (
        "n",
        "return 1 if n < 2 else n * factorial(n - 1)",
        "returns the factorial of a number|computes the factorial of n|calculates a factorial|"
        "gives n factorial|multiplies all numbers up to n|calculates the factorial of a number",
        "compute the factorial of a number|calculate n factorial|get a factorial|"
        "find the factorial of n|calculate the factorial of a number|multiply all numbers up to n",
    ),
    "fibonacci": (
        "n",
        "return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
        "returns the nth Fibonacci number|computes Fibonacci numbers|"
        "calculates the Fibonacci sequence|gives the Fibonacci number of n|"
        "finds the nth number of the Fibonacci sequence|calculates a Fibonacci number",
        "compute Fibonacci numbers|get the nth Fibonacci number|calculate fibonacci|"
        "calculate a Fibonacci number|find the nth number of the Fibonacci sequence|"
        "compute the Fibonacci number of n",
    ),
    "is_palindrome": (
        "text",
        "return text == text[::-1]",
        "checks whether a text is a palindrome|tells if a word is a palindrome|"
        "tests for palindromes|says whether a string is a palindrome|"
        "tests if a text reads the same backwards|is true for palindromes",
        "check if a string is a palindrome|test for a palindrome|"
        "find out whether a word is a palindrome|see if a text is a palindrome|"
        "tell whether a text reads the same backwards|detect a palindrome",
    ),
    "count_vowels": (
        "text",
        "return sum(1 for c in text if c in 'aeiou')",
        "counts the vowels in a string|returns the number of vowels in a text|"
        "tells how many vowels a word has|finds the number of vowels in a word|"
        "counts how many vowels a text has|gives the count of vowels",
        "count the vowels in a string|count vowels|get the number of vowels in a text|"
        "count the vowels of a word|find how many vowels a text has|"
        "tell the number of vowels in a string",
    ),
    "upper": (
        "text",
        "return text.upper()",
        "turns a string into upper case|returns a text in capital letters|"
        "converts a text to uppercase|makes a string uppercase|gives a text in capitals|"
        "changes all letters to capitals",
        "convert a string to uppercase|make a text upper case|capitalize all letters of a string|"
        "change a text to capitals|turn a string into upper case|get a text in capital letters",
    ),
    "lower": (
        "text",
        "return text.lower()",
        "turns a string into lower case|returns a text in small letters|"
        "converts a text to lowercase|makes a string lowercase|gives a text in lower case|"
        "changes all letters to small ones",
        "convert a string to lowercase|make a text lower case|lowercase a string|"
        "change a text to small letters|turn a string into lower case|get a text in lower case",
    ),
    "count_words": (
        "text",
        "return len(text.split())",
        "counts the words in a text|returns the number of words in a string|"
        "tells how many words a sentence has|finds how many words a text has|"
        "gives the number of words in a sentence|counts the words of a string",
        "count the words in a sentence|count words|get the number of words in a text|"
        "find how many words a text has|tell the number of words in a sentence|"
        "count the words of a string",
    ),
    "first": (
        "values",
        "return values[0]",
        "returns the first element of a list|gives the first item of a list|gets the first value|"
        "returns the first value of a list|takes the first element|picks the first item of a list",
        "get the first element of a list|return the first item|pick the first value of a list|"
        "get the first item of a list|take the first element|find the first value of a list",
    ),
    "last": (
        "values",
        "return values[-1]",
        "returns the last element of a list|gives the last item of a list|gets the last value|"
        "returns the last value of a list|takes the last element|picks the last item of a list",
        "get the last element of a list|return the last item|pick the last value of a list|"
        "get the last item of a list|take the last element|find the last value of a list",
    ),
    "average": (
        "numbers",
        "return sum(numbers) / len(numbers)",
        "returns the average of a list|computes the mean of the numbers|"
        "calculates the average of a list of numbers|returns the mean of a list|"
        "gives the average of some numbers|finds the mean value of a list",
        "compute the average of a list|calculate the mean of a list|"
        "get the average of some numbers|find the average of a list of numbers|"
        "calculate the average of numbers|compute the mean of the numbers",
    ),
    "is_positive": (
        "n",
        "return n > 0",
        "checks whether a number is positive|tells if n is greater than zero|"
        "returns whether a number is positive|says if a number is above zero|"
        "is true for positive numbers|tests if n is more than zero",
        "check if a number is positive|test whether n is above zero|see if a number is positive|"
        "see whether n is greater than zero|tell if a number is positive|"
        "test if a number is above zero",
    ),
    "is_empty": (
        "values",
        "return len(values) == 0",
        "checks whether a list is empty|tells if a list is empty|"
        "returns whether there are no values|says whether a list has no elements|"
        "is true for an empty list|tests if there is nothing in a list",
        "check if a list is empty|test whether a list has no elements|see if a list is empty|"
        "see whether a list has nothing in it|tell if a list is empty|"
        "find out whether a list is empty",
    ),
    "absolute": (
        "x",
        "return abs(x)",
        "returns the absolute value of a number|gives the absolute value of x|"
        "computes an absolute value|removes the sign of a number|gives a number without its sign|"
        "calculates the absolute value of x",
        "get the absolute value of a number|compute the absolute value|"
        "return the absolute value of x|find the absolute value of x|remove the sign of a number|"
        "calculate the absolute value of a number",
    ),
    "reverse_list": (
        "values",
        "return values[::-1]",
        "reverses a list|returns a list in reverse order|turns a list around|"
        "gives a list backwards|flips the order of a list|"
        "returns the elements of a list from last to first",
        "reverse a list|turn a list around|flip the order of a list|get a list backwards|"
        "put a list in reverse order|reverse the order of a list",
    ),
    "join": (
        "words",
        "return ' '.join(words)",
        "joins words with spaces|joins a list of words into a text|"
        "makes one string of a list of words|puts words together with spaces|"
        "makes a sentence of a list of words|connects words with spaces",
        "join words with spaces|join a list of words|make one string of many words|"
        "put words together with spaces|make a sentence of a list of words|"
        "connect words with spaces",
    ),
    "merge": (
        "a, b",
        "return a + b",
        "merges two lists|joins two lists|returns two lists as one|puts two lists together|"
        "combines two lists|appends one list to another",
        "merge two lists|join two lists|put two lists together|combine two lists|"
        "append one list to another|make one list of two",
    ),
    "product": (
        "numbers",
        "return numbers[0] * product(numbers[1:]) if numbers else 1",
        "returns the product of a list|multiplies all numbers of a list|"
        "returns the product of the numbers|multiplies the elements of a list|"
        "gives the product of all numbers in a list",
        "multiply all numbers of a list|get the product of a list|multiply all elements|"
        "compute the product of the numbers|find the product of all values",
    ),
    "unique": (
        "values",
        "return list(set(values))",
        "removes duplicates|removes the duplicates of a list|returns a list without duplicates|"
        "returns the unique values of a list|drops what a list has twice",
        "remove duplicates|remove duplicates from a list|get the unique values of a list|"
        "drop the duplicates of a list|get rid of duplicates in a list",
    ),
    "count_letter": (
        "text, letter",
        "return text.count(letter)",
        "counts a letter in a text|counts how often a letter is in a string|"
        "returns how many times a character occurs in a text|counts the occurrences of a letter",
        "count a letter in a text|count how often a character is in a string|"
        "count the occurrences of a letter|find how many times a letter occurs in a word",
    ),
    "contains": (
        "values, x",
        "return x in values",
        "checks whether a list contains a value|tells if x is in a list|"
        "returns whether an element is in a list|tests if a list has a value",
        "check if a list contains a value|test whether x is in a list|"
        "see if an element is in a list|find out whether a list has a value",
    ),
    "descending": (
        "values",
        "return sorted(values, reverse=True)",
        "sorts a list in descending order|sorts a list from high to low|"
        "returns a list sorted backwards|orders a list with the largest first",
        "sort a list in descending order|sort a list from high to low|sort a list backwards|"
        "order a list with the largest first",
    ),
}
