// Which columns of a shard's part each of an item's blocks makes.
#pragma once
#include "exact.cuh"
#include "words.cuh"

struct Columns { int first, count; };

DEV int columns_of_task(const Layer& layer) { return (layer.hidden / 32 + CHUNKS - 1) / CHUNKS * 32; }

DEV Columns columns_of(const Layer& layer, int task) {
  int share = columns_of_task(layer), first = min(task * share, layer.hidden);
  return {first, min(share, layer.hidden - first)};
}
