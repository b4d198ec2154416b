"""Structured tasks for the target: each draws its parameters and states them in the prompt.

A small target answers such prompts with regular text (tables, JSON, CSV, HTML, short functions), which is what
a drafter learns first. A task returns the key of its parameters and the prompt; the key decides the part
(training or held out), so that another wording of the same parameters never crosses over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tokennorm.recipes.dspark.prompt_functions import python_function
from tokennorm.recipes.dspark.prompt_words import (
    FOODS,
    RECORDS,
    THINGS,
    TOPICS,
    TOWNS,
    UNITS,
    Record,
    record_rows,
)

__all__ = ["TASKS", "Task"]

Task = Callable[[random.Random], tuple[str, str]]
"""Draws parameters; returns their key and the prompt's text."""


def _multiplication_table(generator: random.Random) -> tuple[str, str]:
    number, last = generator.randint(2, 99), generator.choice((9, 10, 12, 15))
    wordings = (
        f"Write the multiplication table of {number} from {number} x 1 to {number} x {last}, one line each.",
        f"Write the {number} times table up to {number} x {last}. Use the form {number} x 1 = {number}.",
        f"List the products {number} x 1, {number} x 2 and so on up to {number} x {last}, with the results.",
        f"Show the multiplication table for the number {number} (1 to {last}).",
    )
    return str(number), generator.choice(wordings)


def _addition_table(generator: random.Random) -> tuple[str, str]:
    number, last = generator.randint(2, 120), generator.choice((9, 10, 12, 15))
    wordings = (
        f"Write the addition table of {number} from {number} + 1 to {number} + {last}, one line each.",
        f"List the sums {number} + 1, {number} + 2 and so on up to {number} + {last}, with the results.",
        f"Show the addition table for {number}. Use the form {number} + 1 = {number + 1}, up to {last}.",
    )
    return str(number), generator.choice(wordings)


def _counting(generator: random.Random) -> tuple[str, str]:
    step, count = generator.choice((1, 1, 2, 3, 4, 5, 10)), generator.randint(14, 24)
    first = generator.randint(1, 300)
    last = first + step * (count - 1)
    start = ", ".join(str(first + step * index) for index in range(3))
    steps = "" if step == 1 else f" in steps of {step}"
    wordings = (
        f"Count from {first} to {last}{steps}, separated by commas. Begin with {start}",
        f"Count from {first} to {last}{steps}, one number per line.",
        f"Continue this list up to {last}: {start}, ...",
    )
    return f"{first} {step}", generator.choice(wordings)


def _unit_table(generator: random.Random) -> tuple[str, str]:
    one, many, factor = generator.choice(UNITS)
    first, last = generator.randint(1, 20), generator.choice((9, 10, 12))
    example = f"{first} x {one} = {first * factor} {many}"
    wordings = (
        f"One {one} is {factor} {many}. Write a conversion table from {first} to {first + last}, like: {example}",
        f"Write how many {many} are in {first} to {first + last} times one {one}, one line each, like: {example}",
    )
    return f"{one} {many} {first}", generator.choice(wordings)


def _json_object(generator: random.Random) -> tuple[str, str]:
    kind = generator.choice(list(RECORDS))
    (row,) = record_rows(generator, kind, rows=1, fields=4)
    (other,) = record_rows(generator, generator.choice(list(RECORDS)), rows=1, fields=4)
    wordings = (
        f"Write a JSON object for a {kind} with these fields:\n{_lines(row)}",
        f"Turn this into JSON: {_inline(row)}",
        f"Write this as an indented JSON object with the keys {', '.join(row)}: {_inline(row)}",
        f'Write a JSON object with two objects, "first" ({_inline(row)}) and "second" ({_inline(other)}).',
    )
    text = generator.choice(wordings)
    return _inline(row), text


def _json_list(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(2, 4))
    wordings = (
        f"Turn this into a JSON list of objects with the keys {', '.join(rows[0])}:\n{_block(rows)}",
        f"Write these {len(rows)} records of the kind {kind} as a JSON array:\n{_block(rows)}",
        f"Convert to JSON:\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _csv_table(generator: random.Random) -> tuple[str, str]:
    _, rows = _table(generator, rows=(4, 7))
    header = ",".join(rows[0])
    wordings = (
        f"Write a CSV table with the header {header} from these rows:\n{_block(rows)}",
        f"Turn this into CSV. The first line is {header}.\n{_block(rows)}",
        f"Convert this JSON to CSV with the columns {header}:\n{_json(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _markdown_table(generator: random.Random) -> tuple[str, str]:
    _, rows = _table(generator, rows=(3, 6))
    header = "| " + " | ".join(rows[0]) + " |"
    wordings = (
        f"Write a Markdown table with the columns {', '.join(rows[0])} from these rows:\n{_block(rows)}",
        f"Turn this CSV into a Markdown table that begins with {header}\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _html_list(generator: random.Random) -> tuple[str, str]:
    items = generator.sample(generator.choice((FOODS, THINGS, TOWNS, TOPICS)), generator.randint(5, 9))
    tag, name = generator.choice((("ul", "unordered"), ("ol", "ordered")))
    wordings = (
        f"Write an HTML {name} list with these items: {', '.join(items)}.",
        f"Turn this into an HTML <{tag}> list with one <li> per item: {', '.join(items)}",
        f"Write the HTML code of a <{tag}> list of: {', '.join(items)}",
    )
    return ", ".join(items), generator.choice(wordings)


def _html_table(generator: random.Random) -> tuple[str, str]:
    _, rows = _table(generator, rows=(2, 4))
    wordings = (
        f"Write an HTML table with the columns {', '.join(rows[0])} from these rows:\n{_block(rows)}",
        f"Turn this CSV into an HTML table with <tr> and <td>:\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _xml(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(2, 4))
    wordings = (
        f"Write these records as XML, each in a <{kind}> element:\n{_block(rows)}",
        f"Convert this CSV to XML with one <{kind}> element per row:\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _sql(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(3, 6))
    columns = ", ".join(rows[0])
    wordings = (
        f"Write one SQL INSERT statement per row into the table {kind}s ({columns}):\n{_block(rows)}",
        f"Write SQL INSERT INTO {kind}s ({columns}) statements for this CSV, one per line:\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _key_values(generator: random.Random) -> tuple[str, str]:
    kind, rows = _table(generator, rows=(3, 5))
    wordings = (
        f"Write each field of each {kind} on its own line as key: value.\n{_csv(rows)}",
        f"Write this JSON as YAML:\n{_json(rows)}",
        f"List every {kind} as bullet points, one field per line, like - {_first(rows[0])}\n{_csv(rows)}",
    )
    return _block(rows), generator.choice(wordings)


def _outline(generator: random.Random) -> tuple[str, str]:
    topic = generator.choice(TOPICS)
    sections = generator.sample(("History", "Basics", "Equipment", "Costs", "Safety", "Tips", "Mistakes"), 3)
    wordings = (
        f"Write a Markdown outline about {topic} with the headings {', '.join(sections)} and two short bullet "
        "points under each.",
        f"Write an outline about {topic}. Use ## for the headings {', '.join(sections)} and - for the points.",
    )
    return f"{topic}: {', '.join(sorted(sections))}", generator.choice(wordings)


def _table(generator: random.Random, *, rows: tuple[int, int]) -> tuple[str, list[Record]]:
    kind = generator.choice(list(RECORDS))
    fields = generator.randint(2, min(3, len(RECORDS[kind])))
    return kind, record_rows(generator, kind, rows=generator.randint(*rows), fields=fields)


def _inline(row: Record) -> str:
    return ", ".join(f"{key}: {value}" for key, value in row.items())


def _first(row: Record) -> str:
    return _inline(row).split(", ")[0]


def _lines(row: Record) -> str:
    return "\n".join(f"{key}: {value}" for key, value in row.items())


def _block(rows: list[Record]) -> str:
    return "\n".join(_inline(row) for row in rows)


def _csv(rows: list[Record]) -> str:
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])


def _json(rows: list[Record]) -> str:
    return json.dumps(rows)


TASKS: dict[str, Task] = {
    "multiplication_table": _multiplication_table,
    "addition_table": _addition_table,
    "counting": _counting,
    "unit_table": _unit_table,
    "json_object": _json_object,
    "json_list": _json_list,
    "csv_table": _csv_table,
    "markdown_table": _markdown_table,
    "html_list": _html_list,
    "html_table": _html_table,
    "xml": _xml,
    "sql_inserts": _sql,
    "key_values": _key_values,
    "python_function": python_function,
    "outline": _outline,
}
"""The structured tasks by name, in the order in which prompts are drawn."""
