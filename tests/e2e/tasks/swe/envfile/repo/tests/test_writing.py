"""Settings that are written."""

import pytest
from envfile import read, write


@pytest.mark.parametrize("value", ["plain", "two words", "", "${A}"])
def test_write_is_read_again(value: str) -> None:
    assert read(write({"NAME": value})) == {"NAME": value}
