// What a decode step does around its layers: rows picked, the likeliest ids, inputs made of what was staged, and whole programs of calls.
//
// Rows are short and few, so most of it runs on the caller's thread. Indices are checked, as they come from outside.

#include "kernels.h"
#include "pool.h"

#include <time.h>

#include <cstring>

namespace flatout {
namespace {

constexpr int64_t kPartRows = 16384;    // elements to copy, about a microsecond
constexpr int64_t kPartLogits = 65536;  // likewise to compare

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
}

template <class Operands>
int called(int (*function)(const Operands*), const void* operands) {
  return function(static_cast<const Operands*>(operands));
}

int call(const FlatoutCall& c) {
  switch (c.function) {
    case FLATOUT_CALL_PRODUCT: return called(flatout_product, c.operands);
    case FLATOUT_CALL_ATTENTION: return called(flatout_attention, c.operands);
    case FLATOUT_CALL_ROTATE: return called(flatout_rotate, c.operands);
    case FLATOUT_CALL_GATHER: return called(flatout_gather, c.operands);
    case FLATOUT_CALL_GREEDY: return called(flatout_greedy, c.operands);
    case FLATOUT_CALL_INPUTS: return called(flatout_inputs, c.operands);
    case FLATOUT_CALL_REMEMBER: return called(flatout_remember, c.operands);
    case FLATOUT_CALL_CHUNK: return called(flatout_chunk, c.operands);
    case FLATOUT_CALL_NORM: return called(flatout_norm, c.operands);
    case FLATOUT_CALL_ADD: return called(flatout_add, c.operands);
    case FLATOUT_CALL_GATE: return called(flatout_gate, c.operands);
    case FLATOUT_CALL_ROUTE: return called(flatout_route, c.operands);
    case FLATOUT_CALL_EXPERTS: return called(flatout_experts, c.operands);
    case FLATOUT_CALL_EMBED: return called(flatout_embed, c.operands);
    default: return 1;
  }
}

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_gather(const FlatoutGather* gather) {
  using namespace flatout;
  if (!gather || !is_type(gather->type) || gather->rows < 0 || gather->width <= 0) return 1;
  const FlatoutGather& g = *gather;
  if (g.rows && (!g.source || !g.indices || !g.out)) return 1;
  for (int64_t r = 0; r < g.rows; r++) {
    if (g.indices[r] < 0 || g.indices[r] >= g.source_rows) return 1;
  }
  const Kernels& k = kernels();
  const int64_t size = g.type == FLATOUT_BFLOAT16 ? 2 : 4;
  Turn turn;
  share_ranges(g.rows, g.rows * g.width, kPartRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      char* out = static_cast<char*>(g.out) + r * g.out_stride * size;
      const char* source = static_cast<const char*>(g.source) + g.indices[r] * g.source_stride * size;
      if (g.scale == 1.0f) std::memcpy(out, source, static_cast<size_t>(g.width * size));
      else k.scale(out, source, g.width, g.type, g.scale);
    }
  });
  return 0;
}

FLATOUT_API int flatout_greedy(const FlatoutGreedy* greedy) {
  using namespace flatout;
  if (!greedy || greedy->rows < 0 || greedy->width <= 0 || (greedy->rows && (!greedy->logits || !greedy->ids))) return 1;
  const FlatoutGreedy& g = *greedy;
  const Kernels& k = kernels();
  Turn turn;
  share_ranges(g.rows, g.rows * g.width, kPartLogits, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) g.ids[r] = k.likeliest(g.logits + r * g.stride, g.width);
  });
  return 0;
}

FLATOUT_API int flatout_inputs(const FlatoutInputs* inputs) {
  if (!inputs) return 1;
  const FlatoutInputs& i = *inputs;
  if (!i.tokens || !i.positions || !i.kv_slots || !i.kv_lens || !i.rows || !i.tables || !i.staged || !i.last_ids || i.block_size <= 0) return 1;
  const int32_t *ids = i.staged + 1, *places = ids + i.count, *slots = places + i.count;
  const int32_t *diff_slots = slots + i.count, *columns = diff_slots + i.diffs, *blocks = columns + i.diffs;
  const int64_t diffs = i.staged[0];
  if (diffs < 0 || diffs > i.diffs) return 1;
  for (int64_t d = 0; d < diffs; d++) {
    if (diff_slots[d] < 0 || diff_slots[d] >= i.slots || columns[d] < 0 || columns[d] >= i.width) return 1;
  }
  for (int64_t r = 0; r < i.count; r++) {
    if (slots[r] < 0 || slots[r] >= i.slots || places[r] < 0 || places[r] / i.block_size >= i.width) return 1;
  }
  for (int64_t d = 0; d < diffs; d++) i.tables[diff_slots[d] * i.width + columns[d]] = blocks[d];
  for (int64_t r = 0; r < i.count; r++) {
    const int64_t block = i.tables[slots[r] * i.width + places[r] / i.block_size];
    i.tokens[r] = ids[r] == i.from_device ? i.last_ids[slots[r]] : ids[r];
    i.positions[r] = places[r];
    i.kv_lens[r] = places[r] + 1;
    i.kv_slots[r] = block * i.block_size + places[r] % i.block_size;
    i.rows[r] = slots[r];
  }
  return 0;
}

FLATOUT_API int flatout_remember(const FlatoutRemember* remember) {
  if (!remember || (remember->count && (!remember->last_ids || !remember->rows || !remember->ids))) return 1;
  const FlatoutRemember& r = *remember;
  for (int64_t i = 0; i < r.count; i++) {
    if (r.rows[i] < 0 || r.rows[i] >= r.slots) return 1;
  }
  for (int64_t i = 0; i < r.count; i++) r.last_ids[r.rows[i]] = r.ids[i];
  return 0;
}

FLATOUT_API int64_t flatout_run(const FlatoutCall* calls, int64_t count, int64_t* ns) {
  using namespace flatout;
  for (int64_t i = 0; i < count; i++) {
    const int64_t begin = ns ? now() : 0;
    if (!calls || !calls[i].operands || call(calls[i])) return i;
    if (ns) ns[i] += now() - begin;
  }
  return count;
}
