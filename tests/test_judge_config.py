"""The settings of judges."""

import re
from pathlib import Path

import pytest

from agent_rl.config import check_config
from agent_rl.errors import ConfigError
from agent_rl.judge.config import JudgeConfig


def test_judge_config_takes_no_limit_of_cost_without_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape("max_cost needs prices, a file of what a million tokens cost")):
        check_config(JudgeConfig, {"model": "m", "max_cost": 5})
    monkeypatch.chdir(tmp_path)
    config = check_config(JudgeConfig, {"model": "m", "max_cost": 5, "prices": "prices.yaml"})
    assert config.prices == str(tmp_path / "prices.yaml")


def test_judge_config_takes_no_setting_of_a_model_without_one() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("samples=3 changes nothing without a model: name it, judge.model=")
    ):
        check_config(JudgeConfig, {"samples": 3})
    assert check_config(JudgeConfig, {"concurrency": 2}).model is None
