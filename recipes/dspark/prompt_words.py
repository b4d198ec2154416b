"""Words and records that the prompts of :mod:`tokennorm.recipes.dspark.prompt_templates` are filled with."""

from __future__ import annotations

import random

__all__ = [
    "ANIMALS",
    "COLOURS",
    "FOODS",
    "RECORDS",
    "THINGS",
    "TOWNS",
    "Record",
    "record_rows",
]

Record = dict[str, str | int]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Alice Bruno Carla David Elena Felix Greta Hassan Ines Jonas Katia Liam Mara Nadia Oscar Paula Quentin Rosa "
    "Samir Tessa Ulrich Vera Walter Xenia Yusuf Zoe Anton Bella Cyrus Dora Emil Fatima Gustav Hanna Igor Julia"
)
TOWNS = _words(
    "Paris Rome Berlin Madrid London Lisbon Vienna Oslo Dublin Athens Prague Warsaw Cairo Tokyo Delhi Lima Quito "
    "Toronto Boston Denver Chicago Sydney Nairobi Seoul Hanoi Geneva Milan Porto Krakow Bergen"
)
COLOURS = _words("red blue green yellow black white orange purple brown grey pink silver")
FOODS = _words(
    "apples bananas bread butter carrots cheese coffee eggs flour grapes honey lemons milk mushrooms nuts olives "
    "onions oranges pasta pears peppers potatoes rice salt sugar tea tomatoes yogurt"
)
ANIMALS = _words("cat dog horse rabbit parrot turtle goat sheep duck goose hamster pony lizard frog owl donkey")
THINGS = _words(
    "pen notebook ruler eraser stapler lamp chair desk clock bottle cup plate spoon knife fork bag hat scarf "
    "shirt jacket belt phone camera radio keyboard mouse screen cable battery ticket"
)
JOBS = _words("teacher nurse baker driver painter farmer lawyer pilot cook tailor plumber writer dentist sailor")
TITLES = _words("River Garden Winter Island Harbour Forest Letter Mirror Bridge Silence Storm Journey")
SUBJECTS = _words("math physics history art music biology chemistry geography English sports")
MAKERS = _words("Toyota Ford Fiat Honda Volvo Nissan Mazda Skoda Renault Opel Kia Audi")

# A kind of record: its fields, each with its values.
RECORDS: dict[str, dict[str, tuple[str, ...] | range]] = {
    "person": {"name": NAMES, "age": range(18, 80), "city": TOWNS, "job": JOBS},
    "book": {"title": TITLES, "author": NAMES, "year": range(1950, 2024), "pages": range(90, 600)},
    "car": {
        "make": MAKERS,
        "color": COLOURS,
        "year": range(1990, 2024),
        "price": range(2000, 30000),
    },
    "pet": {"name": NAMES, "animal": ANIMALS, "age": range(1, 15), "color": COLOURS},
    "product": {"item": THINGS, "color": COLOURS, "price": range(2, 90), "stock": range(1, 200)},
    "food": {"food": FOODS, "price": range(1, 20), "quantity": range(1, 50)},
    "student": {"name": NAMES, "subject": SUBJECTS, "grade": range(50, 100)},
    "city": {"city": TOWNS, "temperature": range(-5, 38), "humidity": range(20, 95)},
}


def record_rows(generator: random.Random, kind: str, *, rows: int, fields: int) -> list[Record]:
    """Draw records of one kind: the same first ``fields`` fields in each, no two alike in the first one."""
    names = list(RECORDS[kind])[:fields]
    firsts = generator.sample(list(RECORDS[kind][names[0]]), rows)
    return [
        {names[0]: first} | {name: generator.choice(RECORDS[kind][name]) for name in names[1:]} for first in firsts
    ]
