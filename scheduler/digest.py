"""Hashes of plans, by which a replay knows that it decided as the live run did. Words are hashed, never times."""

from __future__ import annotations

from trilane.jit import compiled

BASIS, PRIME, WORD = 0x811C9DC5, 0x01000193, 0xFFFFFFFF


@compiled(counted=False)
def _mix(digest, value):
    """One more word: a step of FNV-1a by words, and a shift that brings high bits down."""
    digest = ((digest ^ (int(value) & WORD)) * PRIME) & WORD
    return digest ^ (digest >> 15)


@compiled(counted=False)
def plan_digest(layer, experts, rows, num_experts, num_shards, work):
    """A hash of 32 bits of all that a plan says: experts, rows, lanes, slots, victims, copies. Never 0."""
    digest = _mix(BASIS, layer)
    for i in range(num_experts):
        digest = _mix(_mix(digest, experts[i]), rows[i])
    for at in range(num_experts * num_shards):
        digest = _mix(digest, work.lane[at] + (work.run[at] << 8))
        digest = _mix(_mix(digest, work.slot[at]), work.victim[at])
    return digest if digest != 0 else 1


@compiled(counted=False)
def fills_digest(layer, num_fills, work):
    """A hash of what a hint reserved."""
    digest = _mix(BASIS, layer)
    for i in range(num_fills):
        digest = _mix(_mix(_mix(digest, work.fill_shard[i]), work.fill_slot[i]), work.fill_victim[i])
    return digest
