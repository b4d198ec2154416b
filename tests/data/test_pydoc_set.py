from __future__ import annotations

import subprocess
import sys

import pytest

from tokennorm.data import load_pydoc
from tokennorm.errors import DataError


@pytest.fixture(scope="module")
def pydoc():
    return load_pydoc()


def normalised(text: str) -> str:
    return "".join(text.split()).casefold()


def test_the_set_of_this_python(pydoc):
    pairs = [*pydoc.train, *pydoc.held_out]
    assert pydoc.count == len(pairs) > 2_500
    assert all(50 <= len(pair.answer) <= 6_000 for pair in pairs)
    assert max(len(pair.answer) for pair in pairs) > 40 * min(len(pair.answer) for pair in pairs), "uneven"
    assert all(f"`{pair.name}`" in pair.question for pair in pairs)
    assert len({pair.name for pair in pairs}) == len(pairs)
    assert not any(part.startswith("_") for pair in pairs for part in pair.name.split("."))
    assert {pair.kind for pair in pairs} == {"module", "class", "function", "method"}
    dedent = next(pair for pair in pairs if pair.name == "textwrap.dedent")
    assert dedent.answer.startswith("Remove any common leading whitespace")
    assert pydoc.describe().startswith(f"pydoc: {pydoc.count:,} pairs (")


def test_held_out_text_is_nowhere_in_training(pydoc):
    assert 0.12 < len(pydoc.held_out) / pydoc.count < 0.18
    trained = {normalised(pair.answer) for pair in pydoc.train}
    assert not any(normalised(pair.answer) in trained for pair in pydoc.held_out)
    assert len(trained) == len(pydoc.train)


def test_a_pair_is_a_conversation(pydoc):
    conversation = pydoc.train[0].conversation
    assert conversation.roles == ("user", "assistant")
    assert conversation.source == f"pydoc:{pydoc.train[0].name}"


def test_another_process_makes_the_same_set_and_imports_none_of_it(pydoc):
    code = (
        "import sys; from tokennorm.data.pydoc_set import load_pydoc; import socket; before = set(sys.modules)\n"
        "socket.socket = None\n"
        "found = load_pydoc(); print(found.sha256, 'turtle' in sys.modules, 'tkinter' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [pydoc.sha256, "False", "False"]


TEXT = "Return the number of things that there are, in an order that nobody has asked for."


def make_library(root):
    """Thirty documented functions, and everything that has to be left out."""
    for folder in ("pkg", "test", "_private", "site-packages", "config-3.11"):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").write_text(f'"""{TEXT} {folder}."""\n')
    functions = "\n".join(f'def f{i}():\n    """{TEXT} Number {i}."""\n' for i in range(30))
    (root / "module.py").write_text(f'"""Too short."""\nraise RuntimeError("imported")\n{functions}')
    (root / "pkg" / "inner.py").write_text(
        f'class A:\n    """{TEXT} As a class."""\n    def m(self):\n        r"""{TEXT} \\d."""\n'
        f'    def _hidden(self):\n        """{TEXT} Hidden."""\n'
        f'async def again():\n    """{TEXT.upper()}\n\n    number   3!"""\n'
        f"def long():\n    '''{TEXT * 100}'''\n"
    )
    (root / "_hidden.py").write_text(f'"""{TEXT} A hidden module."""\n')
    return root


def test_what_is_taken_and_what_is_left_out(tmp_path):
    found = load_pydoc(make_library(tmp_path))
    kinds = {pair.name: pair.kind for pair in (*found.train, *found.held_out)}
    expected = {f"module.f{i}": "function" for i in range(30)}
    # pkg.inner.again says what module.f3 says, but for case and spaces.
    assert kinds == expected | {"pkg": "module", "pkg.inner.A": "class", "pkg.inner.A.m": "method"}


def test_a_name_keeps_its_part_when_others_come_and_go(tmp_path):
    root = make_library(tmp_path)
    before = load_pydoc(root)
    text = (root / "module.py").read_text()
    (root / "module.py").write_text(text.replace("def f7", "def g7"))
    after = load_pydoc(root)
    held_out = {pair.name for pair in before.held_out}
    assert held_out
    assert held_out - {"module.f7"} == {pair.name for pair in after.held_out} - {"module.g7"}
    assert before.sha256 != after.sha256
    assert load_pydoc(root).sha256 == after.sha256


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(DataError, match="only 0 docstrings in the Python sources under"):
        load_pydoc(tmp_path)
