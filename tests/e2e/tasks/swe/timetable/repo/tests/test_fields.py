"""The fields of entries."""

import pytest
from timetable.fields import field


def test_field_steps() -> None:
    assert field("*/20,5-7", 0, 59) == {0, 5, 6, 7, 20, 40}


def test_field_refuses_others() -> None:
    with pytest.raises(ValueError, match="from 1 to 12"):
        field("0-3", 1, 12)
