"""From a configuration to what the planner takes: options, slots, an empty state. Live runs and replay share it."""

from __future__ import annotations

from trilane.config import Config
from trilane.expert import Geometry
from trilane.plan import Options, make_options
from trilane.state import State, make_state

GPU_COMING_FROM, GPU_COMING_LAYERS = 4, 12  # layers after a step that fills begun after it serve: the first, how many
GPU_LEAST_RATE = 64  # of 256: a fill that is of no use holds up others there, and what the link then serves


def policy_options(config: Config) -> Options:
    """What plans may do."""
    policy = config.policy
    return make_options(
        policy.lanes,
        force=policy.force,
        admit=policy.admit,
        fills=policy.fills,
        split=policy.split,
        background=policy.background and policy.fills and policy.force is None,
    )


def gpu_options(config: Config) -> Options:
    """The same on a GPU, where a fill becomes a hit some layers after it was begun (cuda_fills.py)."""
    return policy_options(config)._replace(
        coming_from=GPU_COMING_FROM, coming_layers=GPU_COMING_LAYERS, least_rate=GPU_LEAST_RATE
    )


def num_slots(config: Config, geometry: Geometry) -> int:
    """Slots in all; each holds one shard of the largest size."""
    return config.cache.num_slots(int(geometry.first_shard[-1]), int(geometry.shard_nbytes.max()))


def empty_state(config: Config, geometry: Geometry, slots: int) -> State:
    """The state of an empty cache of so many slots."""
    cache = config.cache
    return make_state(
        geometry,
        slots,
        pool=cache.pool,
        eviction=cache.eviction,
        half_life_steps=cache.half_life_steps,
        prediction=cache.prediction,
    )
