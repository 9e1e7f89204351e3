"""What ``trilane plan`` prints: where the bytes go, what memory is left, the speed to expect, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trilane.commands.console import open_console, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from trilane.capacity import Capacity
    from trilane.expected_speed import Outlook, Routing, Speed
    from trilane.model_sizes import LayerSizes, ModelSizes


def print_plan(capacity: Capacity, outlook: Outlook | None, *, by_default: bool) -> None:
    """Print all of it.

    Parameters
    ----------
    capacity : Capacity
    outlook : Outlook or None
        None: no speed was asked for.
    by_default : bool
        Nobody named the machine.
    """
    console = open_console()
    _print_model(console, capacity.sizes)
    _print_bytes(console, capacity)
    _print_memory(console, capacity)
    if outlook is not None:
        _print_speed(console, capacity, outlook, by_default)
    _say(console)
    for note in capacity.notes:
        _say(console, f"note:    {note}")
    _print_verdict(console, capacity)


def _say(console: Console, text: str = "") -> None:
    """A line as it is: names of files and models are no markup."""
    console.print(text, markup=False, soft_wrap=True)


def _print_model(console: Console, sizes: ModelSizes) -> None:
    counts = sorted(set(sizes.num_experts))
    experts = " or ".join(map(str, counts))
    uses = "not told how many" if sizes.experts_per_token is None else str(sizes.experts_per_token)
    moe = f"{len(sizes.moe_layers)} of {len(sizes.layers)} layers with {experts} experts, {uses} a token"
    _say(console, f"model:   {sizes.name}, {sizes.architecture or 'no architecture given'}; {moe}")
    if sizes.num_params is not None and sizes.num_active is not None:
        active = f"{sizes.num_active / 1e9:.2f} billion of which a token reads"
        _say(console, f"         {sizes.num_params / 1e9:.2f} billion parameters, {active}")


# ---------------------------------------------------------------------------------------------------- tables
def _print_bytes(console: Console, capacity: Capacity) -> None:
    sizes = capacity.sizes
    rows = [_layers_row(first, last, layer) for first, last, layer in _runs(sizes.layers)]
    rows.append(("in no layer", "", "", "", "", _gb(sizes.outside_nbytes)))
    other = sizes.trunk_nbytes - sizes.shared_nbytes
    rows.append(("in all", "", "", _gb(sizes.store_nbytes), _gb(sizes.shared_nbytes), _gb(other)))
    if sizes.unused_nbytes:
        rows.append(("not used here", "", "", "", "", _gb(sizes.unused_nbytes)))
    _say(console)
    headings = ("layers", "routed experts of each", "expert MB", "routed GB", "shared GB", "all else GB")
    print_table(console, headings, rows, left=headings[:2], title="where the bytes go")


def _runs(layers: tuple[LayerSizes, ...]) -> Iterator[tuple[int, int, list[LayerSizes]]]:
    """First and last number of each run of layers whose experts are alike, and the layers."""
    run: list[LayerSizes] = []
    for layer in layers:
        if run and (layer.num_experts, layer.layout) != (run[0].num_experts, run[0].layout):
            yield run[0].number, run[-1].number, run
            run = []
        run.append(layer)
    if run:
        yield run[0].number, run[-1].number, run


def _layers_row(first: int, last: int, run: list[LayerSizes]) -> tuple[str, ...]:
    from trilane.model_sizes import formats_text

    layout, what, size = run[0].layout, "none, dense", ""
    if layout is not None:
        bias = ", biases" if layout.has_bias else ""
        shape = f"{layout.hidden} x {layout.intermediate}"
        what = f"{run[0].num_experts} of {shape}, {formats_text(layout)}{bias}"
        size = f"{layout.expert_nbytes / 1e6:.2f}"
    sums = (sum(getattr(layer, name) for layer in run) for name in ("experts_nbytes", "shared_nbytes", "other_nbytes"))
    return (f"{first} to {last}" if first != last else str(first), what, size, *map(_gb, sums))


def _print_memory(console: Console, capacity: Capacity) -> None:
    sizes, memory, vram = capacity.sizes, capacity.memory, capacity.vram
    limit = "" if memory.limit_nbytes is None else f", of which {_gb(memory.limit_nbytes)} are allowed"
    left = memory.available_nbytes - sizes.store_nbytes
    rows = [
        (
            "host memory, available",
            _gb(memory.available_nbytes),
            f"{memory.source}, of {_gb(memory.total_nbytes)}{limit}",
        ),
        ("- routed experts", _gb(sizes.store_nbytes), "all of them stay there"),
        ("= left", _gb(left), "it fits" if left >= 0 else "IT DOES NOT FIT"),
        ("device memory, free", _gb(vram.free_nbytes), vram.source),
        ("- trunk, with shared experts", _gb(sizes.trunk_nbytes), "all that is no routed expert"),
        ("- KV cache", _gb(capacity.kv_nbytes), f"of {capacity.context:,} tokens, in 16 bits"),
        ("- buffers for large batches", _gb(capacity.prefill_nbytes), "the scheduler's, at most"),
        ("- left to others", _gb(capacity.reserve_nbytes), "see --reserve"),
        ("= room for slots", _gb(capacity.room_nbytes), _room_text(capacity)),
        ("slots, experts a layer", _count(capacity.experts_a_layer), _slots_text(capacity)),
    ]
    _say(console)
    print_table(console, ("memory", "GB", ""), rows, left=("memory", ""))


def _room_text(capacity: Capacity) -> str:
    room = capacity.room_nbytes
    return "not known" if room is None else "it fits" if room >= 0 else "IT DOES NOT FIT"


def _slots_text(capacity: Capacity) -> str:
    slots, most = capacity.num_slots, capacity.num_shards
    if slots is None:
        return "not known"
    source = "as --slots says" if capacity.wanted is not None else "as many as fit"
    part = f"{slots / most:.1%} of all experts, {_gb(slots * capacity.slot_nbytes)} GB"
    return f"{source}: {part}, {slots:,} slots of a shard"


def _print_speed(console: Console, capacity: Capacity, outlook: Outlook, by_default: bool) -> None:
    _say(console)
    machine = outlook.machine
    name = f"{machine.name} (the default; see --machine)" if by_default else machine.name
    _say(console, f"machine: {name}, {machine.gap_us:g} us between layers; {machine.source}")
    _say(console, "         times are modelled: the machine's rates, no measurement. tokens/s are upper bounds: routed")
    trunk = f"at least {outlook.trunk_us / 1e3:.2f} ms to read trunk and KV cache from device memory"
    _say(console, f"         experts alone, and with {trunk}")
    if machine.profile.machine.gpu is None:
        _say(console, "         it was measured without a GPU: slots and link are main memory, too")
    if not outlook.routings:
        _say(
            console, "no speed: the files do not say how many experts a token uses; put config.json beside, or --trace"
        )
    headings = (
        "slots a layer",
        "of all",
        "device GB",
        "hit rate",
        "MoE ms",
        "tokens/s",
        "with trunk",
        "misses by lane",
    )
    for routing in outlook.routings:
        speeds = [speed for speed in outlook.speeds if speed.routing == routing.name]
        rows = [_speed_row(capacity, outlook, speed) for speed in speeds]
        _say(console)
        print_table(console, headings, rows, left=headings[-1:], title=_routing_text(routing))


def _routing_text(routing: Routing) -> str:
    said = "ASSUMED routing" if routing.is_assumed else "routing"
    return f"{routing.name}, {said}: {routing.about}"


def _speed_row(capacity: Capacity, outlook: Outlook, speed: Speed) -> tuple[str, ...]:
    here = "here: " if speed.num_slots == capacity.num_slots else ""
    missed = {name: nbytes for name, nbytes in speed.lane_nbytes.items() if name != "hit" and nbytes}
    total = sum(missed.values())
    return (
        here + _count(speed.num_slots / capacity.layer_slots),
        f"{speed.num_slots / capacity.num_shards:.1%}",
        _gb(capacity.vram_nbytes(speed.num_slots)),
        f"{speed.hit_rate:.1%}",
        f"{speed.moe_us / 1e3:.2f}",
        f"{speed.tokens_a_second:,.1f}",
        f"{outlook.tokens_a_second(speed):,.1f}",
        ", ".join(f"{name} {nbytes / total:.0%}" for name, nbytes in missed.items()) or "none",
    )


def _print_verdict(console: Console, capacity: Capacity) -> None:
    for shortage in capacity.shortages:
        helps = "; ".join(shortage.remedies)
        _say(console, f"DOES NOT FIT: {shortage.what}: {_gb(shortage.nbytes)} GB too much. What would help: {helps}")
    if capacity.shortages:
        return
    if capacity.room_nbytes is None:
        _say(console, "the experts fit into host memory; device memory is not known")
    else:
        _say(console, f"it fits: slots for {_count(capacity.experts_a_layer)} experts a layer")


def _gb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:,.2f}"


def _count(number: float | None) -> str:
    """A number of experts, with a decimal where it is not whole."""
    return "-" if number is None else f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"
