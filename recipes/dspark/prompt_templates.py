"""Structured tasks for the target: each draws its parameters and states them in the prompt.

A small target answers such prompts with regular text (tables, JSON, CSV, HTML, short functions), which is what
a drafter learns first. A task returns the key of its parameters and the prompt; the key decides the part
(training or held out), so that another wording of the same parameters never crosses over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tokennorm.recipes.dspark.prompt_functions import python_function
from tokennorm.recipes.dspark.prompt_words import (
    ANIMALS,
    COLOURS,
    FOODS,
    RECORDS,
    THINGS,
    Record,
    record_rows,
)

__all__ = ["TASKS", "Task"]

Task = Callable[[random.Random], tuple[str, str]]
"""Draws parameters; returns their key and the prompt's text."""


def _multiplication_table(generator: random.Random) -> tuple[str, str]:
    number, last = generator.randint(2, 99), generator.choice((9, 10, 12))
    wordings = (
        f"Write the multiplication table of {number} from {number} x 1 to {number} x {last}, one line each.",
        f"Write the multiplication table of {number} from 1 to {last}, one line each.",
        f"Write a Python program that prints the multiplication table of {number} from 1 to {last}.",
    )
    return str(number), generator.choice(wordings)


def _json_object(generator: random.Random) -> tuple[str, str]:
    kind = generator.choice(list(RECORDS))
    (row,) = record_rows(generator, kind, rows=1, fields=4)
    values = ", ".join(map(str, row.values()))
    wordings = (
        f"Write a JSON object for a {kind} with these fields:\n{_lines(row)}",
        f"Turn this into JSON: {_inline(row)}",
        f"Write a JSON object with the keys {_and(list(row))} for {values}.",
        f"Write a JSON object named {kind} with the keys {_and(list(row))}. The values are {values}.",
    )
    return _inline(row), generator.choice(wordings)


def _json_map(generator: random.Random) -> tuple[str, str]:
    items = _priced(generator)
    text = ", ".join(f"{item} {price}" for item, price in items.items())
    wordings = (
        f"Write a JSON object that maps each item to its price: {text}.",
        f"Write a JSON object named prices: {text}.",
        f"Turn this price list into JSON: {text}",
    )
    return text, generator.choice(wordings)


def _csv_table(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(3, 6))
    columns, listed = _and(list(rows[0])), _listed(rows)
    wordings = (
        f"Write a CSV table with the columns {columns} for {listed}.",
        f"Write a CSV file with the columns {columns} for {listed}.",
        f"Turn this into CSV. The first line is {','.join(rows[0])}.\n{_block(rows)}",
        f"Write a CSV table of {kind}s with the header {','.join(rows[0])} from these rows:\n{_block(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _markdown_table(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(3, 6))
    columns, listed = _and([name.capitalize() for name in rows[0]]), _listed(rows)
    wordings = (
        f"Create a Markdown table with the columns {columns} for {listed}.",
        f"Write a Markdown table with the columns {columns} for {listed}.",
        f"Write a table of {kind}s with the columns {columns} for {listed}.",
    )
    return _block(rows), generator.choice(wordings)


def _html_list(generator: random.Random) -> tuple[str, str]:
    items = ", ".join(_items(generator, 4, 6))
    tag = generator.choice(("ul", "ol"))
    wordings = (
        f"Write the HTML code of a <{tag}> list of: {items}",
        f"Turn this into an HTML <{tag}> list with one <li> per item: {items}",
    )
    return items, generator.choice(wordings)


def _html_select(generator: random.Random) -> tuple[str, str]:
    items = _items(generator, 4, 6)
    wordings = (
        f"Write the HTML code of a <select> element with the options {_and(items)}.",
        f"Write an HTML <select> with these <option> elements: {', '.join(items)}",
    )
    return ", ".join(items), generator.choice(wordings)


def _html_table(generator: random.Random) -> tuple[str, str]:
    _, rows = _table(generator, rows=(3, 4))
    columns, listed = _and([name.capitalize() for name in rows[0]]), _listed(rows)
    wordings = (
        f"Create an HTML table with the columns {columns} for {listed}.",
        f"Write the HTML code of a <table> with the columns {columns} for {listed}.",
    )
    return _block(rows), generator.choice(wordings)


def _table(generator: random.Random, *, rows: tuple[int, int]) -> tuple[str, list[Record]]:
    kind = generator.choice(list(RECORDS))
    fields = generator.randint(2, min(3, len(RECORDS[kind])))
    return kind, record_rows(generator, kind, rows=generator.randint(*rows), fields=fields)


def _items(generator: random.Random, fewest: int, most: int) -> list[str]:
    return generator.sample(generator.choice((FOODS, THINGS, ANIMALS, COLOURS)), generator.randint(fewest, most))


def _priced(generator: random.Random) -> dict[str, int]:
    items = generator.sample(generator.choice((FOODS, THINGS)), generator.randint(4, 6))
    return {item: generator.randint(1, 60) for item in items}


def _and(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _listed(rows: list[Record]) -> str:
    """``Anna (31, Paris) and Paul (45, Rome)``."""
    firsts = [str(next(iter(row.values()))) for row in rows]
    others = [", ".join(map(str, list(row.values())[1:])) for row in rows]
    return _and([f"{first} ({other})" for first, other in zip(firsts, others, strict=True)])


def _inline(row: Record) -> str:
    return ", ".join(f"{key}: {value}" for key, value in row.items())


def _lines(row: Record) -> str:
    return "\n".join(f"{key}: {value}" for key, value in row.items())


def _block(rows: list[Record]) -> str:
    return "\n".join(_inline(row) for row in rows)


TASKS: dict[str, Task] = {
    "multiplication_table": _multiplication_table,
    "json_object": _json_object,
    "json_map": _json_map,
    "csv_table": _csv_table,
    "markdown_table": _markdown_table,
    "html_list": _html_list,
    "html_select": _html_select,
    "html_table": _html_table,
    "python_function": python_function,
}
"""The structured tasks by name, in the order in which prompts are drawn."""
