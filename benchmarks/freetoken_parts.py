"""FreeToken's decode layer in parts, for freetoken_bench.py: what it runs on, and what its parts take.

Calls public functions of the `freetoken` wheel (0.2.1, Apache-2.0) and repeats none of its code. Environment variables
are set by freetoken_bench.py before this is imported.
"""

from __future__ import annotations

import math
import os
import statistics

import numpy as np
import torch

DEV = torch.device("cuda:0")
ROLES = ("gate_up_packed", "gate_up_scale", "gate_up_global", "down_packed", "down_scale", "down_global")
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


# ------------------------------------------------------------------------------------------- its surroundings
def patch_pinned(native: bool) -> str:
    """Replace the functions of kernel/pinned.py that cache and executor use, unless ``native``.

    The extension that ships with the wheel was built against torch 2.14. With torch 2.11 it does not load or, worse,
    loads and corrupts memory. To be called before cpu_executor and benchbw are imported, which bind the names.
    """
    import freetoken.kernel.pinned as pinned

    if native:
        tensor = pinned.alloc_pinned_tensor(64, dtype=torch.uint8)
        assert tensor.is_pinned() and pinned.device_ptr(tensor) == tensor.data_ptr()
        return "native"
    runtime = torch.cuda.cudart()
    kept: list = []  # registered ranges live as long as the process

    def alloc_pinned_tensor(*shape, dtype):
        if len(shape) == 1 and isinstance(shape[0], (list, tuple)):
            shape = tuple(shape[0])
        nbytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        if nbytes < 1 << 20:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        raw = torch.empty(nbytes + 4096, dtype=torch.uint8)
        start = (-raw.data_ptr()) % 4096
        raw = raw[start : start + nbytes]
        raw.fill_(0)  # fault the pages first
        status = runtime.cudaHostRegister(raw.data_ptr(), nbytes, 3)  # portable | mapped
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister({nbytes}) failed: {status}")
        kept.append(raw)
        return raw.view(dtype).view(shape)

    pinned.alloc_pinned_tensor = alloc_pinned_tensor
    pinned.device_ptr = lambda tensor: tensor.data_ptr()  # the same address on Linux
    pinned.host_register = lambda address, nbytes: runtime.cudaHostRegister(address, nbytes, 3)
    pinned.host_unregister = lambda address: runtime.cudaHostUnregister(address)
    pinned._load_pinned_extension = lambda: None
    pinned._host_ptr_identity = lambda: True
    return "patched"


def patch_threads() -> str:
    """Give FreeToken its best case on a machine without SMT siblings: two cores less for its pool.

    By itself it takes every core; then fewer than two are spare and it turns spinning off, which costs a futex wake for
    each worker and layer. A thread count given explicitly leaves its coordinator unpinned, which turns that
    thread's spinning off. So the count stays automatic, and two cores are hidden from it.
    """
    import freetoken.moe.cpu_executor as executor

    own = executor.resolve_threads_and_affinity

    def resolve(requested):
        count, cores = own(requested)
        if not requested and count > 4 and len(os.sched_getaffinity(0)) - count < 2:
            count, cores = count - 2, cores[:-2]
        return count, cores

    executor.resolve_threads_and_affinity = resolve
    return f"{own(0)[0]} -> {resolve(0)[0]} pool cores"


def make_banks(layers: int, experts: int, hidden: int, inter: int, seed: int):
    """Random NVFP4 experts, {role: [pinned (experts, ...) for each layer]}, and the bytes of one expert."""
    from freetoken.kernel.pinned import alloc_pinned_tensor

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, ((64 << 20) + 977,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x28, 0x38, ((8 << 20) + 331,), dtype=torch.uint8, generator=generator)  # e4m3, no NaN
    shapes = {
        "gate_up_packed": ((2 * inter, hidden // 2), torch.uint8),
        "gate_up_scale": ((2 * inter, hidden // 16), torch.float8_e4m3fn),
        "gate_up_global": ((2 * inter,), torch.float32),
        "down_packed": ((hidden, inter // 2), torch.uint8),
        "down_scale": ((hidden, inter // 16), torch.float8_e4m3fn),
        "down_global": ((hidden,), torch.float32),
    }
    banks: dict[str, list] = {name: [] for name in shapes}
    for layer in range(layers):
        for name, (row, dtype) in shapes.items():
            bank = alloc_pinned_tensor(experts, *row, dtype=dtype)
            if dtype == torch.float32:
                bank.fill_(0.05)
            else:
                start = (layer * 7919 + len(name) * 104729) % 65536
                _repeat(bank.view(torch.uint8).view(-1), noise if name.endswith("packed") else scales, start)
            banks[name].append(bank)
    nbytes = sum(math.prod(row) * torch.empty((), dtype=dtype).element_size() for row, dtype in shapes.values())
    return banks, nbytes


def _repeat(flat, source, start):
    """Fill with pieces of a source, each beginning elsewhere."""
    at = 0
    while at < flat.numel():
        count = min(source.numel() - start, flat.numel() - at)
        flat[at : at + count].copy_(source[start : start + count])
        at, start = at + count, (start + 4099) % 65536


# ------------------------------------------------------------------------------------------------ a reference
def _dequantize(packed, scale, factor):
    table = torch.tensor(_FP4, device=DEV)
    codes = packed.to(DEV).long()
    values = torch.stack([table[codes & 15], table[codes >> 4]], -1).flatten(-2)  # low half: even columns
    return values * scale.to(DEV).float().repeat_interleave(16, -1) * factor.to(DEV)[:, None]


def reference(banks, layer, x, ids, weights):
    """One layer in float32."""
    out = torch.zeros(x.shape[1], device=DEV)
    row, inter = x[0].float(), banks["gate_up_packed"][0].shape[1] // 2
    for expert, weight in zip(ids.flatten().tolist(), weights.flatten().tolist(), strict=True):
        gate_up = _dequantize(*(banks[name][layer][expert] for name in ROLES[:3])) @ row
        h = torch.nn.functional.silu(gate_up[:inter]) * gate_up[inter:]
        out += weight * (_dequantize(*(banks[name][layer][expert] for name in ROLES[3:])) @ h)
    return out


# ----------------------------------------------------------------------------------------- what its parts take
def timed_graph(call, reps=20, inner=20):
    """us of a call, from graphs of ``inner`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(reps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner * 1e3)
    return statistics.median(times)


def breakdown(rig, expert_nbytes):
    """us of copies by misses, of the product, of a look-up without misses, of the CPU's round trip by routes."""
    args, cache, found = rig.args, rig.cache, {}
    cache.reset()
    cache._pending_src_layer, cache._pending_whole_layer, cache._pending_fetch_cap = 0, False, None
    slots = cache.pool_slots(0)
    found["copy_us_by_misses"] = copies = {}
    for misses in range(args.top_k + 1):
        count = max(misses, 1)
        cache.evict_slots[:count].copy_(torch.randperm(slots, device=DEV)[:count].int())
        cache.src_indices[:count].copy_(torch.randperm(args.experts, device=DEV)[:count].int())
        cache.num_indices.fill_(misses)
        copies[misses] = round(timed_graph(cache.copy_missing), 2)
    found["copy_gbs_at_topk"] = round(args.top_k * expert_nbytes / copies[args.top_k] / 1e3, 1)
    ids = torch.randperm(slots, device=DEV)[: args.top_k].int().view(1, args.top_k).contiguous()
    found["gemm_us"] = round(timed_graph(lambda: rig.product(0, rig.weights[0], ids)), 2)
    cache.reset()
    if rig.mode != "cpu":
        found["ensure_all_hit_us"] = round(timed_graph(_all_hits(rig)), 2)
    if rig.executor is not None:
        found |= _round_trips(rig, expert_nbytes)
    return found


def _all_hits(rig):
    """A look-up that finds everything, after its first call."""
    hits = torch.arange(rig.args.top_k, device=DEV, dtype=torch.int32).view(1, rig.args.top_k)

    def ensure():
        ids = hits.clone()
        if rig.mode == "hybrid":
            rig.cache.ensure_experts_hybrid(0, ids, rig.weights[0], clamp=True)
        else:
            rig.cache.ensure_experts(0, ids)

    return ensure


def _round_trips(rig, expert_nbytes):
    """us from the doorbell to the sum, by experts that the CPU computes."""
    args, executor, times = rig.args, rig.executor, {}
    y = torch.zeros(1, args.hidden, dtype=torch.bfloat16, device=DEV)
    draws = [np.random.default_rng(i).permutation(args.experts)[: args.top_k].astype(np.int32) for i in range(40)]
    windows, calls = [torch.from_numpy(draw).to(DEV) for draw in draws], iter(range(10**9))
    for routes in range(args.top_k + 1):

        def trip(routes=routes):
            call = next(calls)
            ids = torch.full((1, args.top_k), -1, dtype=torch.int32, device=DEV)
            if routes:
                ids[0, :routes].copy_(windows[call % 40][:routes])
            pending = executor.decode_submit(call % args.layers, rig.x, rig.weights[0], ids)
            executor.decode_sync(pending, add_to=y)

        times[routes] = round(timed_graph(trip, reps=10, inner=40), 2)
    marginal = round((args.top_k - 1) * expert_nbytes / max(times[args.top_k] - times[1], 1e-6) / 1e3, 1)
    return {
        "cpu_roundtrip_us_by_routes": times,
        "cpu_gbs_marginal": marginal,
        "cpu_fixed_us": round(times[1] - expert_nbytes / max(marginal, 1e-6) / 1e3, 2),
        "executor": {"isa": executor.isa, "threads": executor.num_threads, "spin": bool(executor.spin_wait),
                     "flag_sync": bool(executor._flag_sync), "kernel_io": bool(executor._kernel_io)},
    }  # fmt: skip


def calibrate(args):
    """FreeToken's own calibration for this kind of layer, as its ``ft bench bw --model`` would write it."""
    from freetoken.moe import benchbw

    load = benchbw.Workload("peer", args.hidden, args.inter, args.experts, args.top_k, ("nvfp4",))
    found = {"pcie_gather_gbs": round(benchbw.measure_pcie_gather_bw("nvfp4", load, DEV)["bw_gbs"], 2)}
    cpu = benchbw.measure_cpu_moe_bw("nvfp4", load, num_threads=args.cpu_threads)
    found["cpu_moe_gbs"], found["isa"] = cpu["bw_gbs"], cpu["isa"]
    both = benchbw.measure_overlap_bw("nvfp4", load, DEV, num_threads=args.cpu_threads)
    found["cpu_overlap_gbs"], found["pcie_overlap_gbs"] = round(both["cpu_gbs"], 2), round(both["pcie_gbs"], 2)
    found["fraction"] = min(1.0, both["pcie_gbs"] / (both["pcie_gbs"] + both["cpu_gbs"]))
    found["verdict"] = benchbw.recommend(found["cpu_moe_gbs"], found["pcie_gather_gbs"])
    torch.cuda.empty_cache()
    return found
