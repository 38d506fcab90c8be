// The experts of a mixture: tokens in order of expert, two products of each expert's rows, and every token's sum. No arithmetic, which is
// kernels.inc's; the products themselves are products.cpp's.
//
// Blocks of all experts are shared out together, an expert's by the number of its rows, so that one token's few experts and a batch's many both
// use all threads. A row meets a block as in any product, and a token's sum goes by its own choices: company and threads change no bit.
//
// Milliseconds here / by torch's loop over experts (60 experts, top 4, 2048 x 1408, bfloat16, 2 threads on 2 vCPUs with AMX, each time
// others are chosen): 1 token 3.0 / 8.4, 8 tokens 20 / 44, 64 tokens 49 / 73, 256 tokens 130 / 114; of 4 bits, beside
// another process, 1 token 1.9, 8 tokens 12 to 14.

#include "amx.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"

namespace flatout {
namespace {

constexpr int64_t kMostScratch = 64 << 20;  // bytes for the rows of a chunk of tokens; longer prompts pass chunk by chunk
constexpr int64_t kPartSums = 4096;         // products to add up, about a microsecond
constexpr int64_t kBlockCost = 4;           // of reading a block of lines, where a row that meets it costs 1 (plain.inc's figures)

thread_local Scratch scratch;

// Rows of one expert, in places first ... last - 1; by AMX from row `tile` on.
struct Group {
  int64_t expert, first, last, tile;
};

// A chunk of tokens, their choices in order of expert: places.
struct Chunk {
  int64_t* places;   // [tokens][top_k]
  int64_t* tokens;   // [places]: whose each is
  int64_t* ends;     // [experts]
  Group* groups;     // of experts that were chosen
  int64_t count, met;  // places and groups

  static int64_t bytes(int64_t count, int64_t experts) {
    return count * 2 * sizeof(int64_t) + experts * (sizeof(int64_t) + sizeof(Group));
  }
};

Chunk sorted(const FlatoutExperts& e, int64_t first, int64_t last, char* memory) {
  const int64_t count = (last - first) * e.top_k, *chosen = e.chosen + first * e.top_k;
  Chunk c;
  c.places = reinterpret_cast<int64_t*>(memory);
  c.tokens = c.places + count;
  c.ends = c.tokens + count;
  c.groups = reinterpret_cast<Group*>(c.ends + e.experts);
  c.count = count;
  c.met = 0;
  std::fill(c.ends, c.ends + e.experts, 0);
  for (int64_t i = 0; i < count; i++) c.ends[chosen[i]]++;
  int64_t place = 0, tile = 0;
  for (int64_t i = 0; i < e.experts; i++) {
    const int64_t rows = c.ends[i];
    if (rows) c.groups[c.met++] = {i, place, place + rows, tile};
    c.ends[i] = place;
    place += rows;
    tile += amx::padded(rows);
  }
  for (int64_t i = 0; i < count; i++) {
    c.places[i] = c.ends[chosen[i]]++;
    c.tokens[c.places[i]] = first + i / e.top_k;
  }
  return c;
}

// run(part, group, begin, end) over blocks of all groups, each of `blocks` of so many bytes, by all threads.
template <class Run>
void share_blocks(const Chunk& c, int64_t blocks, int64_t bytes, const Run& run) {
  const int64_t all = blocks * (c.met * kBlockCost + c.count);
  const int64_t parts = parts_of(all, all / kBlockCost * bytes, kPartBlocks);
  share(static_cast<int>(parts), [&](int part) {
    const int64_t begin = all * part / parts, end = all * (part + 1) / parts;
    int64_t at = 0;  // what the groups before cost
    for (int64_t i = 0; i < c.met && at < end; i++) {
      const Group& g = c.groups[i];
      const int64_t each = kBlockCost + g.last - g.first;
      // a block is whose part its beginning lies in
      const auto first_from = [&](int64_t cost) { return std::clamp<int64_t>((cost - at + each - 1) / each, 0, blocks); };
      if (begin < at + blocks * each) run(part, g, first_from(begin), first_from(end));
      at += blocks * each;
    }
  });
}

enum class By { kPlain, kPacked, kTiles };

By by(int32_t kind, int32_t many) { return kind >= 16 ? By::kPlain : many ? By::kTiles : By::kPacked; }

int64_t weight_bytes(int32_t kind, int64_t lines, int64_t columns) {
  return kind >= 16 ? lines * columns * kind / 8 : lines / kLines * (columns / kGroup) * group_bytes(kind);
}

// Places that a chunk's rows take in tiles, where each group begins a pair of them.
int64_t tile_rows(int64_t count, int64_t experts) { return count + std::min(count, experts) * (amx::padded(1) - 1); }

// Memory for the rows of a chunk, ready for a product, and what else it takes.
int64_t ready_bytes(By how, int64_t count, int64_t experts, int64_t columns) {
  int64_t bytes = 0;
  if (how == By::kPlain) bytes = count * prepared_stride(columns) * sizeof(float);
  else if (how == By::kPacked) bytes = Rows::bytes(count, columns);
  else bytes = tile_rows(count, experts) * columns * 2 + threads() * kPartsEach * amx::scratch_bytes(count, columns);
  return (bytes + 63) / 64 * 64;
}

// One of the two products of a chunk: each place's row of p.x, which `from` names or which has the place's number, times its expert's lines.
struct Product {
  const FlatoutProduct& p;  // its weight is the stack, its out and rows are places
  const Kernels& k;
  const Chunk& c;
  const int64_t* from;
  int64_t experts;
  int32_t many;
  char* memory;
  int64_t blocks = (p.outputs + kLines - 1) / kLines;
  int64_t bytes = weight_bytes(p.kind, p.outputs * (p.gate ? 2 : 1), p.columns);  // of an expert

  int64_t row(int64_t place) const { return from ? from[place] : place; }

  FlatoutProduct of(const Group& g) const {
    FlatoutProduct one = p;
    one.weight = static_cast<const char*>(p.weight) + g.expert * bytes;
    return one;
  }

  void run() const {
    switch (by(p.kind, many)) {
      case By::kPlain: return plain();
      case By::kPacked: return packed();
      case By::kTiles: return tiles();
    }
  }

  void plain() const {
    float* x = reinterpret_cast<float*>(memory);
    share_ranges(c.count, c.count * p.columns, kPartRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) k.prepare[p.kind == 32](p, row(i), x + i * prepared_stride(p.columns));
    });
    share_blocks(c, blocks, bytes / blocks,
                 [&](int, const Group& g, int64_t begin, int64_t end) { plain_blocks(of(g), k, x, g.first, g.last, begin, end); });
  }

  void packed() const {
    const Rows rows(c.count, p.columns, k.most_rows, memory);
    share_ranges(p.columns / kGroup, c.count * p.columns, kPartRows, [&](int64_t begin, int64_t end) {  // as in products.cpp
      for (int64_t i = 0; i < c.met; i++) {
        const Group& g = c.groups[i];
        for (int64_t r = g.first; r < g.last; r++) {
          const int place = static_cast<int>((r - g.first) % k.most_rows);
          k.quantise(p, row(r), 1.0f, rows.tile(r - place, g.last), place, begin, end);
        }
      }
    });
    share_blocks(c, blocks, bytes / blocks,
                 [&](int, const Group& g, int64_t begin, int64_t end) { packed_blocks(of(g), k, rows, g.first, g.last, begin, end); });
  }

  // By AMX, two blocks at a time.
  void tiles() const {
    uint16_t* x = reinterpret_cast<uint16_t*>(memory);
    const int64_t x_bytes = tile_rows(c.count, experts) * p.columns * 2;
    const int64_t each = amx::scratch_bytes(c.count, p.columns);  // more than a row takes
    const int parts = static_cast<int>(std::min<int64_t>(threads() * kPartsEach, c.count));
    share(parts, [&](int part) {
      float* wide = reinterpret_cast<float*>(memory + x_bytes + part * each);
      for (int64_t i = 0; i < c.met; i++) {
        const Group& g = c.groups[i];
        const int64_t rows = g.last - g.first, all = amx::padded(rows);
        for (int64_t r = all * part / parts; r < all * (part + 1) / parts; r++) {
          if (r < rows) k.prepare[1](p, row(g.first + r), wide);  // as float32
          amx::round_row(r < rows ? wide : nullptr, p.columns, r, x + g.tile * p.columns);
        }
      }
    });
    const int64_t pairs = p.gate ? blocks : (blocks + 1) / 2;
    share_blocks(c, pairs, bytes / pairs, [&](int part, const Group& g, int64_t begin, int64_t end) {
      FlatoutProduct one = of(g);
      one.rows = g.last - g.first;
      one.out = static_cast<float*>(p.out) + g.first * p.out_stride;
      for (int64_t i = begin; i < end; i++) {
        const int64_t first = p.gate ? i : 2 * i, second = p.gate ? blocks + i : std::min(2 * i + 1, blocks - 1);
        amx::pair(one, x + g.tile * p.columns, first, second, memory + x_bytes + part * each);
      }
    });
  }
};

bool can(const FlatoutExperts& e) {
  if (!is_type(e.type) || e.gate <= FLATOUT_NO_GATE || e.gate > FLATOUT_GELU || e.experts <= 0 || e.top_k <= 0 || e.tokens < 0) return false;
  const auto suits = [](const void* weight, int32_t kind, int64_t lines, int64_t columns) {
    return is_packed(weight, kind, lines, columns) || is_plain(weight, kind, lines, columns);
  };
  if (!suits(e.gate_up, e.gate_up_kind, e.width, e.hidden) || !suits(e.down, e.down_kind, e.hidden, e.width)) return false;
  if (e.many && (e.gate_up_kind >= 16 || e.down_kind >= 16 || !amx::available())) return false;
  if (e.tokens && (!e.x || !e.weights || !e.chosen || !e.out)) return false;
  const int64_t* end = e.chosen + e.tokens * e.top_k;
  return std::all_of(e.chosen, end, [&](int64_t expert) { return expert >= 0 && expert < e.experts; });
}

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_experts(const FlatoutExperts* experts) {
  using namespace flatout;
  if (!experts || !can(*experts)) return 1;
  const FlatoutExperts& e = *experts;
  if (e.tokens == 0) return 0;
  const Kernels& k = kernels();
  Turn turn;  // also for threads(), by which memory is counted
  const int64_t floats = (e.width + e.hidden) * static_cast<int64_t>(sizeof(float));
  const By hows[] = {by(e.gate_up_kind, e.many), by(e.down_kind, e.many)};
  const auto ready = [&](int64_t count) {
    return std::max(ready_bytes(hows[0], count, e.experts, e.hidden), ready_bytes(hows[1], count, e.experts, e.width));
  };
  const int64_t a_token = e.top_k * (prepared_stride(std::max(e.hidden, e.width)) * static_cast<int64_t>(sizeof(float)) + floats);
  const int64_t step = std::clamp<int64_t>(kMostScratch / a_token, 1, e.tokens), most = step * e.top_k;
  char* memory = scratch.at_least(ready(most) + most * floats + Chunk::bytes(most, e.experts));
  if (!memory) return 1;
  float* act = reinterpret_cast<float*>(memory + ready(most));  // [places][width]
  float* parts = act + most * e.width;                          // [places][hidden]
  for (int64_t first = 0; first < e.tokens; first += step) {
    const int64_t last = std::min(first + step, e.tokens);
    const Chunk chunk = sorted(e, first, last, reinterpret_cast<char*>(parts + most * e.hidden));
    FlatoutProduct p{};
    p.x = e.x, p.x_stride = e.x_stride, p.x_type = e.type;
    p.weight = e.gate_up, p.kind = e.gate_up_kind;
    p.columns = e.hidden, p.outputs = p.out_stride = e.width;
    p.gate = e.gate;
    p.out = act, p.out_type = FLATOUT_FLOAT32, p.scale = 1.0f;
    Product{p, k, chunk, chunk.tokens, e.experts, e.many, memory}.run();
    p.x = act, p.x_stride = e.width, p.x_type = FLATOUT_FLOAT32;
    p.weight = e.down, p.kind = e.down_kind;
    p.columns = e.width, p.outputs = p.out_stride = e.hidden;
    p.gate = FLATOUT_NO_GATE;
    p.out = parts;
    Product{p, k, chunk, nullptr, e.experts, e.many, memory}.run();
    const int64_t wide = e.hidden / 16;  // pieces of a token's sum, so that one token's is shared out too
    share_ranges((last - first) * wide, chunk.count * e.hidden, kPartSums, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin, until; at < end; at = until) {
        const int64_t token = at / wide, from = at % wide;
        until = std::min(end, (token + 1) * wide);
        k.combine(e, first + token, parts, chunk.places + token * e.top_k, from * 16, (from + until - at) * 16);
      }
    });
  }
  return 0;
}
