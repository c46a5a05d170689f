"""ScaleRL's sigmoid: known curves are found again, and `agent-rl stats RUN --fit` foretells a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from agent_rl.cli import main
from agent_rl.errors import ConfigError
from agent_rl.stats.scaling import Sigmoid, fit_sigmoid, forecast

COMPUTE = np.arange(1, 101) * 128.0
CURVES = [Sigmoid(0.1, 0.8, 1.5, 2000), Sigmoid(0.0, 1.0, 0.8, 8000), Sigmoid(0.3, 0.6, 4.0, 4000)]


@pytest.mark.parametrize("true", CURVES)
def test_fit_finds_known_parameters(true: Sigmoid) -> None:
    found = fit_sigmoid(COMPUTE, true.at(COMPUTE))
    assert (found.start, found.asymptote) == pytest.approx((true.start, true.asymptote), abs=1e-4)
    assert (found.steepness, found.midpoint) == pytest.approx((true.steepness, true.midpoint), rel=1e-3)


def test_sigmoid_is_half_way_at_its_midpoint() -> None:
    curve = Sigmoid(0.1, 0.7, 2.0, 500.0)
    assert curve.at(500.0) == pytest.approx(0.4)
    assert curve.at([250.0, 1000.0]) == pytest.approx([0.1 + 0.6 / 5, 0.1 + 0.6 / 1.25])


def test_fit_takes_rewards_beyond_shares() -> None:
    true = Sigmoid(-3.0, 7.0, 1.2, 3000.0)
    assert fit_sigmoid(COMPUTE, true.at(COMPUTE)).at(COMPUTE) == pytest.approx(true.at(COMPUTE), abs=1e-3)


def test_fit_keeps_shares_within_one() -> None:
    found = fit_sigmoid(COMPUTE[:20], 0.2 + COMPUTE[:20] / COMPUTE[19] * 0.5)  # a line, as far as it is seen
    assert 0 <= found.start <= found.asymptote <= 1
    falling = fit_sigmoid(COMPUTE, 0.9 - COMPUTE / 2e4)
    assert falling.asymptote == pytest.approx(falling.start)  # no rise is found where there is none


def test_fit_takes_a_measured_start() -> None:
    true = Sigmoid(0.1, 0.95, 1.4, 2000.0)
    assert fit_sigmoid(COMPUTE, true.at(COMPUTE), 0.1).asymptote == pytest.approx(0.95, abs=1e-4)
    falling = fit_sigmoid(COMPUTE, 0.9 - COMPUTE / 2e4, 0.95)
    assert falling.asymptote == falling.start == 0.95


def test_measured_start_foretells_more() -> None:
    true, rng = Sigmoid(0.1, 0.95, 1.4, 2000.0), np.random.default_rng(0)
    off: dict[float | None, list[float]] = {None: [], true.start: []}
    for _ in range(10):  # the noise of 128 episodes a point, of which 9 are seen
        values = rng.binomial(128, true.at(COMPUTE[:39])) / 128
        for start, errors in off.items():
            errors.append(forecast(COMPUTE[:39], values, start).errors[1])
    assert np.mean(off[true.start]) < 0.9 * np.mean(off[None])


def test_forecast_is_fitted_to_the_first_quarter() -> None:
    true = Sigmoid(0.05, 0.95, 2.0, 1500.0)
    noise = np.random.default_rng(0).normal(0, 0.02, len(COMPUTE))
    found = forecast(COMPUTE, np.clip(true.at(COMPUTE) + noise, 0, 1))
    assert found.fitted == 25
    own, rest = found.errors
    assert own < 0.03 and rest < 0.1 < found.flat_error
    assert found.whole.at(COMPUTE) == pytest.approx(true.at(COMPUTE), abs=0.03)


@pytest.mark.parametrize("n", [0, 4, 5])
def test_forecast_refuses_too_few_points(n: int) -> None:
    with pytest.raises(ConfigError, match="train for more steps"):
        forecast(COMPUTE[:n], COMPUTE[:n] / 1e5)


def test_fit_refuses_no_compute() -> None:
    with pytest.raises(ConfigError, match="positive compute"):
        fit_sigmoid(COMPUTE - 128, COMPUTE)


def run_of(folder: Path, true: Sigmoid) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text("env: calculator-v0\nrollout: {groups: 4, samples: 8}\n")
    (folder / "episodes.jsonl").touch()
    rows = [
        {"kind": "train", "step": step, "rollout/success": float(true.at(32 * (step - 1))) if step > 1 else true.start}
        for step in range(1, 62)
    ]
    evals = [
        {"kind": "eval", "step": s, "split": "dev", "sampling": "greedy", "success": 0.5} for s in range(0, 61, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *evals]))
    return str(folder)


def test_stats_fits_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = Sigmoid(0.125, 0.75, 1.5, 400.0)
    run, picture = run_of(tmp_path / "run", true), tmp_path / "fit.svg"
    assert main(["stats", run, "--fit", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "rollout/success over compute, in sampled training episodes: 60 points, up to 1,920" in out
    assert "R0 was measured before the first update: 0.125" in out
    assert "fitted to all of them:  R0 0.125, A 0.750, B 1.50, C_mid 400" in out and "first 15 points, 25%" in out
    assert picture.read_text().startswith("<svg") and "forecast" in picture.read_text()
    assert main(["stats", run, "--fit", "eval/dev/greedy/success", "--json", "--svg", str(picture)]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["points"][0] == [320.0, 0.5] and table["fitted"] == 5 and table["rms_error_rest"] < 1e-6


def test_stats_names_the_metrics_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", CURVES[0])
    assert main(["stats", run, "--fit", "rollout/succes"]) == 1
    assert "Did you mean 'rollout/success'?" in capsys.readouterr().err
    assert main(["stats", run, "--svg", "x.svg"]) == 1
    assert "give --fit, too" in capsys.readouterr().err
    assert main(["stats", run, run, "--fit", "--where", "step>9"]) == 1
    assert "--fit reads the metrics of one run: leave out RUN2, --where" in capsys.readouterr().err
