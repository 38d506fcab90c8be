// Calls every kernel of the native library on buffers of exactly the right size (attention's queries of 16 bits: of twice that), from two threads, while the number of workers changes; and
// once in a forked child. Built with it under sanitizers by test_native.py; says "done" where they found nothing. Values, which are that
// file's to check, are any bits at all, but for float32.

#include "native.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class T>
std::vector<T> exactly(size_t n, unsigned seed) {
  std::vector<T> v(n);
  for (size_t i = 0; i < n; i++) v[i] = static_cast<T>(static_cast<uint32_t>((i + seed) * 2654435761u) >> (sizeof(T) == 4 ? 24 : 8));
  v.shrink_to_fit();
  return v;
}

int one(int64_t rows, int64_t outputs, int64_t columns, int kind, int gate, bool half, bool all) {
  const int64_t lines = outputs * (gate ? 2 : 1);
  const bool is_plain = kind >= 16;
  const auto weight = exactly<uint8_t>(is_plain ? lines * columns * kind / 8 : lines / 16 * (columns / 32) * (kind == 4 ? 320 : 544), 1);
  const auto wide = exactly<float>(rows * columns, 2), bias = exactly<float>(lines, 3), norm = exactly<float>(columns, 4);
  const auto narrow = exactly<uint16_t>(rows * columns, 5);
  std::vector<float> out(rows * outputs), plain(lines * columns);
  std::vector<uint16_t> half_out(rows * outputs), half_plain(lines * columns);
  FlatoutProduct p{};
  p.x = half ? static_cast<const void*>(narrow.data()) : wide.data();
  p.out = half ? static_cast<void*>(half_out.data()) : out.data();
  p.x_type = p.out_type = half;
  p.weight = weight.data();
  p.bias = all ? bias.data() : nullptr;
  p.norm = all ? norm.data() : nullptr;
  p.add = all;
  p.x_stride = columns;
  p.out_stride = p.outputs = outputs;
  p.rows = rows;
  p.columns = columns;
  p.kind = kind;
  p.gate = gate;
  p.eps = 1e-5f;
  p.scale = 0.5f;
  if ((kind <= 8 || (kind == 16 && outputs % 16 == 0 && columns % 32 == 0)) && flatout_has_tiles()) {
    p.many = 1;
    if (flatout_product(&p)) return 1;
    p.many = 0;
  }
  void* values = half ? static_cast<void*>(half_plain.data()) : plain.data();
  if (is_plain) return flatout_product(&p);
  return flatout_product(&p) | flatout_dequantise(weight.data(), kind, lines, columns, values, columns, half);
}

int attend(int32_t heads, int32_t kv_heads, int32_t dim, int32_t window, bool half, int32_t cache = -1) {
  const int32_t lengths[] = {1, 300, 17}, rows[] = {2, 0, 1}, tokens[] = {0, 1, 2};
  const int32_t block = 16, width = 19;
  std::vector<int32_t> tables(3 * width);
  for (size_t i = 0; i < tables.size(); i++) tables[i] = static_cast<int32_t>(i);
  const int32_t cache_type = cache < 0 ? half : cache;
  const size_t slots = tables.size() * block * kv_heads, asked = 3u * heads * dim;
  const size_t cached = slots * (cache_type == FLATOUT_INT8 ? dim + 4 : dim * (cache_type == FLATOUT_FLOAT32 ? 4 : 2));  // bytes
  const auto q = exactly<float>(asked, 1);
  const auto k = exactly<uint8_t>(cached, 2), v = exactly<uint8_t>(cached, 3);
  std::vector<float> out(asked);
  FlatoutAttention a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.out = out.data();
  a.tables = tables.data(), a.kv_lens = lengths, a.rows = rows, a.tokens = tokens;
  a.q_stride = a.out_stride = heads * dim;
  a.table_stride = width;
  a.count = 3;
  a.heads = heads, a.kv_heads = kv_heads, a.dim = dim, a.block_size = block, a.window = window;
  a.type = half;  // twice as many values as are read
  a.cache_type = cache_type;
  a.scale = 0.01f;
  a.softcap = window ? 30.0f : 0.0f;
  std::vector<float> qk(3u * (heads + kv_heads) * dim), value(3u * kv_heads * dim), turns(3u * 2 * dim), norm(dim);
  std::vector<uint8_t> k_cache(cached), v_cache(cached);
  const int64_t to[] = {5, 0, 40};
  FlatoutRotation r{};
  r.qk = qk.data(), r.value = value.data(), r.k_cache = k_cache.data(), r.v_cache = v_cache.data(), r.slots = to;
  r.cos = turns.data(), r.sin = turns.data() + dim / 2, r.q_norm = r.k_norm = norm.data();
  r.tokens = 3;
  r.stride = (heads + kv_heads) * dim, r.value_stride = kv_heads * dim, r.turn_stride = dim;
  r.heads = heads, r.kv_heads = kv_heads, r.dim = dim, r.rotary = dim / 32 * 32 / 2 / 32 * 32, r.type = half, r.cache_type = a.cache_type;
  if (r.rotary == 0) r.cos = nullptr;
  r.eps = 1e-5f;
  return flatout_attention(&a) | flatout_rotate(&r);
}

// What stands around a decode step's layers, as one program.
int step(int64_t width, bool half) {
  const auto wide = exactly<float>(5 * width, 1);
  const auto narrow = exactly<uint16_t>(5 * width, 2);
  std::vector<float> out(2 * width);
  std::vector<uint16_t> half_out(2 * width);
  const int64_t indices[] = {4, 0};
  FlatoutGather g{};
  g.source = half ? static_cast<const void*>(narrow.data()) : wide.data(), g.out = half ? static_cast<void*>(half_out.data()) : out.data();
  g.indices = indices, g.source_stride = g.out_stride = g.width = width, g.rows = 2, g.source_rows = 5, g.type = half, g.scale = 2.0f;
  int64_t ids[5];
  FlatoutGreedy chosen{};
  chosen.logits = wide.data(), chosen.ids = ids, chosen.stride = chosen.width = width, chosen.rows = 5;
  std::vector<int64_t> tokens(2), positions(2), kv_slots(2), last{7, 8, 9};
  std::vector<int32_t> kv_lens(2), rows(2), tables(3 * 4), staged{1, -1, 5, 3, 17, 2, 0, 2, 1, 1, 0, 9, 9};
  FlatoutInputs i{};
  i.tokens = tokens.data(), i.positions = positions.data(), i.kv_slots = kv_slots.data(), i.kv_lens = kv_lens.data(), i.rows = rows.data();
  i.tables = tables.data(), i.staged = staged.data(), i.last_ids = last.data();
  i.count = i.diffs = 2, i.slots = 3, i.width = 4, i.block_size = 16, i.from_device = -1;
  FlatoutRemember r{};
  r.last_ids = last.data(), r.rows = rows.data(), r.ids = ids, r.count = 2, r.slots = 3;
  const FlatoutCall calls[] = {{FLATOUT_CALL_INPUTS, &i}, {FLATOUT_CALL_GATHER, &g}, {FLATOUT_CALL_GREEDY, &chosen}, {FLATOUT_CALL_REMEMBER, &r}};
  int64_t ns[4] = {};
  return flatout_run(calls, 4, ns) != 4 || flatout_run(calls, 4, nullptr) != 4;
}

// A chunk of 16-bit caches, where the machine has tiles.
int chunk(int64_t count, int64_t keys, int32_t dim, int32_t window, bool half, bool apart, bool codes = false) {
  if (!flatout_has_tiles()) return 0;
  const int32_t heads = 6, kv_heads = 2;
  const auto wide = exactly<float>(count * heads * dim, 1);
  const auto narrow = exactly<uint16_t>(count * heads * dim, 2);
  const int64_t cached = keys * kv_heads * (codes ? dim + 4 : 2 * dim);  // bytes
  const auto k = exactly<uint8_t>(cached, 3), v = exactly<uint8_t>(cached, 4);
  std::vector<float> out(count * heads * dim);
  std::vector<uint16_t> half_out(count * heads * dim);
  std::vector<int64_t> slots(keys);
  for (int64_t i = 0; i < keys; i++) slots[i] = keys - 1 - i;
  FlatoutChunk c{};
  c.q = half ? static_cast<const void*>(narrow.data()) : wide.data(), c.out = half ? static_cast<void*>(half_out.data()) : out.data();
  c.k = k.data(), c.v = v.data(), c.slots = apart ? slots.data() : nullptr;
  c.q_stride = c.out_stride = heads * dim;
  c.count = count, c.keys = keys, c.heads = heads, c.kv_heads = kv_heads, c.dim = dim, c.window = window;
  c.type = half, c.cache_type = codes ? FLATOUT_INT8 : half ? FLATOUT_BFLOAT16 : FLATOUT_FLOAT16;
  c.scale = 0.01f;
  return flatout_chunk(&c);
}

// A mixture's block: norm, router, experts, their gates and sums.
int mixture(int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden, int64_t width, int kind, int down_kind, bool half) {
  const auto bytes = [](int64_t lines, int64_t columns, int k) { return k >= 16 ? lines * columns * k / 8 : lines / 16 * (columns / 32) * (k == 4 ? 320 : 544); };
  const auto gate_up = exactly<uint8_t>(experts * bytes(2 * width, hidden, kind), 1), down = exactly<uint8_t>(experts * bytes(hidden, width, down_kind), 2);
  const auto wide = exactly<float>(tokens * 2 * hidden, 3);
  const auto narrow = exactly<uint16_t>(tokens * 2 * hidden, 4), narrow_logits = exactly<uint16_t>(tokens * experts, 5);
  const auto logits = exactly<float>(tokens * experts, 6);
  std::vector<float> out(tokens * hidden), weights(tokens * top_k);
  std::vector<uint16_t> half_out(tokens * hidden);
  std::vector<int64_t> chosen(tokens * top_k);
  const void* x = half ? static_cast<const void*>(narrow.data()) : wide.data();
  void* to = half ? static_cast<void*>(half_out.data()) : out.data();
  FlatoutRoute r{};
  r.logits = half ? static_cast<const void*>(narrow_logits.data()) : logits.data();
  r.weights = weights.data(), r.chosen = chosen.data(), r.stride = r.experts = experts, r.rows = tokens, r.top_k = top_k, r.type = half, r.renormalise = half;
  FlatoutExperts e{};
  e.x = x, e.gate_up = gate_up.data(), e.down = down.data(), e.weights = weights.data(), e.chosen = chosen.data(), e.out = to;
  e.x_stride = e.out_stride = e.hidden = hidden, e.tokens = tokens, e.width = width, e.experts = experts, e.top_k = top_k;
  e.type = half, e.gate_up_kind = kind, e.down_kind = down_kind, e.gate = FLATOUT_SILU;
  FlatoutNorm n{};
  n.x = x, n.weight = x, n.out = to, n.x_stride = n.out_stride = n.width = hidden, n.rows = tokens, n.type = half, n.eps = 1e-5f, n.offset = half;
  FlatoutAdd a{};
  a.x = x, a.gates = half ? nullptr : x, a.out = to, a.x_stride = a.out_stride = a.width = hidden - 1, a.gate_stride = 1, a.rows = tokens, a.type = half, a.scale = 0.5f;
  FlatoutGate g{};
  g.x = x, g.out = to, g.x_stride = 2 * hidden, g.out_stride = g.width = hidden, g.rows = tokens, g.type = half, g.gate = FLATOUT_GELU;
  const FlatoutCall calls[] = {{FLATOUT_CALL_ROUTE, &r}, {FLATOUT_CALL_EXPERTS, &e}, {FLATOUT_CALL_NORM, &n}, {FLATOUT_CALL_ADD, &a}, {FLATOUT_CALL_GATE, &g}};
  if (flatout_run(calls, 5, nullptr) != 5) return 1;
  e.many = kind <= 8 && down_kind <= 8 && flatout_has_tiles();
  return e.many && flatout_experts(&e);
}

// Every block type, as packed weights and line by line.
int blocks(int64_t lines, int64_t columns) {
  int failed = 0;
  const int formats[][3] = {{FLATOUT_Q4_0, 32, 18}, {FLATOUT_Q4_1, 32, 20}, {FLATOUT_Q5_0, 32, 22}, {FLATOUT_Q5_1, 32, 24}, {FLATOUT_Q8_0, 32, 34},
                            {FLATOUT_Q4_K, 256, 144}, {FLATOUT_Q5_K, 256, 176}, {FLATOUT_Q6_K, 256, 210}};
  std::vector<int64_t> order(lines);
  for (int64_t i = 0; i < lines; i++) order[i] = lines - 1 - i;
  const int64_t ids[] = {lines - 1, 0, 5};
  std::vector<float> wide(3 * columns);
  std::vector<uint16_t> narrow(3 * columns);
  FlatoutEmbed e{};
  e.indices = ids;
  e.out_stride = e.width = columns;
  e.rows = 3;
  e.lines = lines;
  e.scale = 2.0f;
  auto embed = [&](const uint8_t* source, int format) {
    e.source = source;
    e.format = format;
    for (int type : {FLATOUT_FLOAT32, FLATOUT_BFLOAT16}) {
      e.type = type;
      e.out = type ? static_cast<void*>(narrow.data()) : wide.data();
      failed |= flatout_embed(&e);
    }
  };
  for (const auto& f : formats) {
    auto source = exactly<uint8_t>(lines * columns / f[1] * f[2], f[0]);
    for (auto& byte : source) byte &= 0x3F;  // factors are finite
    for (int kind : {4, 8}) {
      std::vector<uint8_t> packed(lines / 16 * (columns / 32) * (kind == 4 ? 320 : 544));
      const bool can = kind == 8 || f[0] == FLATOUT_Q4_0 || f[0] == FLATOUT_Q4_1 || f[0] == FLATOUT_Q4_K;
      failed |= flatout_repack(source.data(), f[0], order.data(), lines, columns, kind, packed.data()) != !can;
      embed(packed.data(), -kind);
    }
    embed(source.data(), f[0]);
  }
  return failed;
}

int all() {
  int failed = chunk(1, 1, 32, 0, false, false) | chunk(33, 70, 64, 0, true, true) | chunk(65, 65, 96, 20, false, true) | chunk(40, 200, 256, 0, false, false);
  failed |= chunk(33, 70, 64, 0, true, true, true) | chunk(65, 100, 96, 20, false, true, true) | chunk(40, 200, 256, 0, false, false, true);
  failed |= mixture(1, 5, 2, 96, 64, 16, 32, false) | mixture(9, 3, 3, 64, 32, 4, 8, true) | mixture(40, 33, 4, 112, 48, 32, 16, true);
  failed |= mixture(3, 1, 1, 32, 96, 8, 4, false) | mixture(70, 2, 1, 16, 16, 16, 16, false);
  failed |= blocks(48, 512);
  failed |= step(1, false) | step(33, true) | step(2051, false);
  failed |= attend(8, 1, 16, 0, false) | attend(3, 3, 80, 7, false) | attend(4, 2, 64, 0, true) | attend(7, 1, 256, 0, true) | attend(3, 3, 80, 7, false, FLATOUT_FLOAT16);
  failed |= attend(6, 2, 64, 0, false, FLATOUT_INT8) | attend(8, 1, 48, 7, true, FLATOUT_INT8) | attend(3, 3, 256, 0, false, FLATOUT_INT8);
  for (int64_t rows : {1, 3, 17}) {
    for (int64_t outputs : {16, 208}) {
      for (int64_t columns : {32, 544}) {
        for (int gate = 0; gate < 4; gate++) {
          for (int kind : {4, 8, 16}) failed |= one(rows, outputs, columns, kind, gate, rows == 3, gate % 2);
          for (int kind : {16, 32}) failed |= one(rows, outputs - 3, columns + 16, kind, gate, rows == 3, gate % 2);  // no whole tiles
        }
      }
    }
  }
  return failed;
}

}  // namespace

int main() {
  int failed = 0;
  for (const char* isa : {"scalar", "avx2", "avx512_vnni"}) {
    if (flatout_use_isa(isa)) continue;
    std::thread beside([&] {
      for (int threads : {3, 1, 4, 2}) flatout_threads(threads), usleep(3000);
    });
    std::thread other([] { all(); });
    failed |= all();
    other.join();
    beside.join();
  }
  const pid_t child = fork();
  if (child == 0) _exit(one(9, 208, 544, 4, 1, false, true));
  int status = 0;
  waitpid(child, &status, 0);
  flatout_threads(1);
  if (failed || status) return std::printf("failed %d, in the child %d\n", failed, status), 1;
  std::puts("done");
}
