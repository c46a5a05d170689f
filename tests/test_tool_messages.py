"""agent_rl.gym.tool_messages: results as text."""

from dataclasses import dataclass

import numpy as np
import pytest

from agent_rl.core.messages import ToolErrorKind
from agent_rl.gym.tool_messages import as_text
from tests.doubles import Color, Point


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it\nis", "as it\nis"),
        (None, ""),
        (3, "3"),
        (3.0, "3.0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (True, "true"),
        (False, "false"),
        ({"a": [1, None, "é"]}, '{"a":[1,null,"é"]}'),
        ((1, 2.0), "[1,2.0]"),
        (Point(x=1), '{"x":1,"y":0}'),
        ([Point(x=1)], '[{"x":1,"y":0}]'),
        (Color.RED, '"red"'),
        (ToolErrorKind.TIMEOUT, "timeout"),
        (np.float64(2.0), "2.0"),
        (np.int64(2), "2"),
        (np.arange(2), "[0,1]"),
        (["\udce9", {"\udce9": Point(x=1), "b": {0.5}}], '["\udce9",{"\udce9":{"x":1,"y":0},"b":[0.5]}]'),
    ],
    ids=repr,
)
def test_as_text_converts_results(value, text):
    assert as_text(value) == text
    assert type(as_text(value)) is str


def test_as_text_says_what_has_no_json_form():
    with pytest.raises(TypeError, match=r"^a result of type object has no JSON form"):
        as_text([object()])


def test_as_text_gives_sets_one_order():
    @dataclass
    class Found:
        names: set[str]

    letters = set("abcdefghij")
    text = str(sorted(letters)).replace("'", '"').replace(" ", "")
    assert as_text(letters) == text
    assert as_text({"of": [frozenset(letters)]}) == f'{{"of":[{text}]}}'
    assert as_text((Found(letters),)) == f'[{{"names":{text}}}]'
    assert as_text({10, 9, -1, 2.5, "é", (2, "b"), (1, "c"), None}) == '[-1,2.5,9,10,null,[1,"c"],[2,"b"],"é"]'
