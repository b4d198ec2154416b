"""Small Python functions to ask for: families with a number or a word in them, so that there are many."""

from __future__ import annotations

import random

__all__ = ["python_function"]

# Name, arguments and what it returns; {n} is a number and {w} a word that the name shows.
FAMILIES = (
    ("add_{n}", "x", "x plus {n}"),
    ("subtract_{n}", "x", "x minus {n}"),
    ("multiply_by_{n}", "x", "x times {n}"),
    ("divide_by_{n}", "x", "x divided by {n}"),
    ("is_multiple_of_{n}", "x", "True if x is a multiple of {n}, else False"),
    ("is_greater_than_{n}", "x", "True if x is greater than {n}, else False"),
    ("is_less_than_{n}", "x", "True if x is less than {n}, else False"),
    ("power_{n}", "x", "x to the power of {n}"),
    ("numbers_above_{n}", "numbers", "a list of the numbers that are greater than {n}"),
    ("multiples_of_{n}", "count", "a list of the first count multiples of {n}"),
    ("print_first_{n}", "items", "nothing, but prints the first {n} items with a for loop"),
    ("first_{n}", "items", "the first {n} items of the list"),
    ("last_{n}", "items", "the last {n} items of the list"),
    ("repeat_{n}_times", "text", "the text repeated {n} times"),
    ("sum_to_{n}", "", "the sum of the numbers from 1 to {n}, added up with a for loop"),
    ("count_{w}", "words", "how often '{w}' is in the list of words"),
    ("contains_{w}", "text", "True if the text contains '{w}', else False"),
    ("starts_with_{w}", "text", "True if the text starts with '{w}', else False"),
    ("remove_{w}", "words", "the list of words without '{w}'"),
    ("add_{w}", "words", "the list of words with '{w}' at the end"),
    ("print_{w}", "count", "nothing, but prints '{w}' count times with a for loop"),
    ("greet_{w}", "name", "the text 'Hello {w}, I am ' followed by the name"),
)
SINGLE = (
    ("add", "a, b", "a plus b"),
    ("subtract", "a, b", "a minus b"),
    ("multiply", "a, b", "a times b"),
    ("average", "numbers", "the average of the numbers"),
    ("is_even", "n", "True if n is even, else False"),
    ("is_odd", "n", "True if n is odd, else False"),
    ("square", "x", "x squared"),
    ("cube", "x", "x to the power of 3"),
    ("maximum", "a, b", "the larger of a and b"),
    ("minimum", "a, b", "the smaller of a and b"),
    ("rectangle_area", "width, height", "width times height"),
    ("rectangle_perimeter", "width, height", "2 times the sum of width and height"),
    ("circle_area", "radius", "3.14159 times radius squared"),
    ("triangle_area", "base, height", "half of base times height"),
    ("box_volume", "width, height, depth", "width times height times depth"),
    ("celsius_to_fahrenheit", "celsius", "celsius times 9 / 5 plus 32"),
    ("factorial", "n", "the factorial of n, with a for loop"),
    ("fibonacci", "n", "a list of the first n Fibonacci numbers"),
    ("reverse_text", "text", "the text reversed"),
    ("count_vowels", "text", "how many vowels the text has"),
    ("is_palindrome", "text", "True if the text reads the same backwards"),
    ("sum_list", "numbers", "the sum of the numbers, added up with a for loop"),
    ("largest", "numbers", "the largest number of the list"),
    ("even_numbers", "numbers", "a list of the even numbers"),
    ("squares", "n", "a list of the squares from 1 to n"),
    ("count_words", "text", "how many words the text has"),
    ("distance", "x1, y1, x2, y2", "the distance between the two points"),
    ("full_name", "first, last", "first and last joined by a space"),
)
WORDS = ("apple", "dog", "blue", "Anna", "milk", "table", "winter", "piano", "river", "gold", "tiger", "lemon")


def python_function(generator: random.Random) -> tuple[str, str]:
    """Draw a function; the key is its name, which says what it does."""
    if generator.random() < 0.3:
        name, arguments, returns = generator.choice(SINGLE)
    else:
        number, word = generator.choice((*range(2, 13), 15, 20, 25, 50, 100)), generator.choice(WORDS)
        name, arguments, returns = (part.format(n=number, w=word) for part in generator.choice(FAMILIES))
    signature = f"{name}({arguments})"
    takes = f"takes {arguments}" if arguments else "takes no argument"
    wordings = (
        f"Write a Python function {signature} that returns {returns}.",
        f"Write a Python function named {name} that {takes} and returns {returns}. Add a docstring.",
        f'Complete this Python code and show one example call:\n\ndef {signature}:\n    """Return {returns}."""',
    )
    return name, generator.choice(wordings)
