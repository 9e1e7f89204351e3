"""Whole steps by number of misses: the asked-for misses happen, and the model predicts a played machine."""

import json

import numpy as np
import pytest
from made_profile import make_profile
from typer.testing import CliRunner

from trilane.cli import app
from trilane.config import Config
from trilane.step_bench import StepShape, all_errors, measure_steps, played_rates, random_store

SHAPE = StepShape(hidden=512, intermediate=512, num_experts=16, top_k=4)
pytestmark = pytest.mark.alone
PLAYED = {"link_gb_s": 0.25, "link_fix_us": 50.0, "zero_copy_gb_s": 0.2, "hit_gb_s": 1.0, "cpu_gb_s": 0.25}


@pytest.fixture(scope="module")
def rows():
    config = Config(cache={"fraction": 0.5}, host_device=PLAYED)
    return list(measure_steps(random_store(SHAPE), SHAPE, [config], misses=[0, 1, 4], repeats=8))


def test_misses_are_as_asked(rows):
    assert [(row.hits, row.misses) for row in rows] == [(4, 0), (3, 1), (0, 4)]
    for row in rows:
        assert row.lanes["hit"] == pytest.approx(2 * row.hits)
        assert sum(row.lanes.values()) == pytest.approx(2 * SHAPE.top_k)


def test_a_played_step_takes_at_least_its_limit(rows):
    for row in rows:
        assert row.measured_us >= 0.99 * row.limit_us
        assert row.predicted_us >= 0.99 * row.limit_us


def test_predictions_of_a_played_machine_hold(rows):
    """On a busy machine single steps take any time; the best of each kind must come near what was predicted."""
    assert all(len(row.errors) == 8 for row in rows)
    assert max(min(row.errors) for row in rows) < 0.2
    assert all_errors(rows)[0] > 0


def test_more_misses_than_experts_absent_give_no_figure():
    config = Config(cache={"fraction": 1.0}, host_device=PLAYED)
    shape = StepShape(hidden=256, intermediate=256, num_experts=4, top_k=3, format="q8_0")
    (row,) = measure_steps(random_store(shape), shape, [config], misses=[3], repeats=2)
    assert np.isnan(row.measured_us) and row.to_dict()["measured_us"] is None and row.errors == ()


def test_rates_to_play_leave_every_lane_time_to_sleep():
    rates = played_rates(make_profile(), "q4_k")
    core = make_profile().device_experts["q4_k"]
    assert len(rates) == 3 and len({rate["link_gb_s"] for rate in rates}) == 3
    for rate in rates:
        assert rate["hit_gb_s"] + rate["link_gb_s"] + rate["cpu_gb_s"] < core


def test_command_prints_json():
    options = ["--hidden", "256", "--intermediate", "256", "--experts", "8", "--top-k", "2", "-f", "q8_0"]
    result = CliRunner().invoke(app, ["bench", "step", *options, "--repeats", "2", "--link-gb-s", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"machine", "rows", "median_error", "p90_error"} <= set(found)
    assert {"median_single_step_error", "p90_single_step_error"} <= set(found)
    assert {"predicted_us", "measured_us", "limit_us", "hits", "misses"} <= set(found["rows"][0])


@pytest.mark.parametrize(
    "options, text",
    [
        (["--experts", "8", "--top-k", "6"], "of which half are resident: give 4 at most"),
        (["--top-k", "2", "--misses", "3"], "3 misses of a token's 2 experts"),
        (["--format", "q5"], "q5"),
    ],
)
def test_command_refuses_what_cannot_be(options, text):
    result = CliRunner().invoke(app, ["bench", "step", *options])
    assert result.exit_code == 2 and text in " ".join(result.output.replace("│", " ").split())
