"""Rates learned live on the host device, whose CPU lane plays a tenth of what it is believed to reach."""

import numpy as np
import pytest
from numba import config
from test_engine import step_inputs, store  # noqa: F401

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@pytest.mark.parametrize("learns", [False, True])
def test_a_lane_that_is_slower_than_believed_gets_less(store, scheduler_of, learns):  # noqa: F811
    scheduler = scheduler_of(
        store,
        cache={"fraction": 0.0},
        policy={"learn_rates": learns, "lanes": ["zero_copy", "cpu"]},
        host_device={"cpu_gb_s": 0.2, "zero_copy_gb_s": 0.5},
    )
    runner = scheduler._runner
    runner.rates = [one._replace(cpu_us_per_byte=one.cpu_us_per_byte / 20) for one in runner.rates]
    before = [one.cpu_us_per_byte for one in runner.rates]
    for seed in range(40):
        x, ids, weights = step_inputs(rows=1, seed=seed)
        scheduler.forward(0, x, ids, weights)
    after = [one.cpu_us_per_byte for one in runner.rates]
    if learns:
        assert np.all(np.array(after) > 3 * np.array(before))
    else:
        assert after == before
