// Attention of rows with one query each, and the rotation and cache write before it: what is refused, how a context is cut, and who takes which
// piece. No arithmetic: attention.inc's.
//
// A context is cut into pieces of kPiece keys whatever the threads and the other rows, and its pieces are put together in order, so a row has the
// same bits in any company. A piece is all heads' keys: they lie side by side, and are read as they lie.

#include "amx.h"
#include "kernels.h"
#include "pool.h"
#include "scratch.h"

#include <algorithm>

namespace flatout {
namespace {

constexpr int64_t kPartTokens = 4096;  // elements to rotate, about a microsecond
constexpr int64_t kPartMerge = 32768;  // likewise to put together
constexpr int64_t kPartQueries = 8192; // bytes to lay out

bool can(const FlatoutAttention& a) {
  return is_type(a.type) && is_cache(a.cache_type, a.type) && a.q && a.k && a.v && a.out && a.tables && a.kv_lens && a.rows && a.tokens && a.count >= 0 && a.kv_heads > 0 &&
         a.heads % a.kv_heads == 0 && a.heads / a.kv_heads <= kMostHeads && a.dim > 0 && a.dim <= kMostDim && a.dim % 16 == 0 && a.block_size > 0 &&
         (a.block_size & (a.block_size - 1)) == 0 &&
         a.window >= 0;
}

bool can(const FlatoutRotation& r) {
  return is_type(r.type) && is_cache(r.cache_type, r.type) && r.qk && r.value && r.k_cache && r.v_cache && r.slots && r.tokens >= 0 && r.dim > 0 && r.dim % 16 == 0 &&
         (!r.cos || (r.sin && r.rotary > 0 && r.rotary <= r.dim && r.rotary % 32 == 0));
}

int64_t first_key(const FlatoutAttention& a, int64_t index) {
  const int64_t keys = a.kv_lens[a.rows[index]];
  return a.window ? std::max<int64_t>(0, keys - a.window) : 0;
}

int64_t pieces_of(const FlatoutAttention& a, int64_t index) { return (a.kv_lens[a.rows[index]] - first_key(a, index) + kPiece - 1) / kPiece; }

// Elements of the cache before each of a row's keys first ... first + count - 1.
void find(const FlatoutAttention& a, int64_t index, int64_t first, int64_t count, int64_t* at) {
  const int32_t row = a.rows[index];
  const int32_t* table = a.tables + (a.table_rows ? a.table_rows[row] : row) * a.table_stride;
  const int shift = __builtin_ctz(static_cast<unsigned>(a.block_size));
  const int64_t width = a.kv_heads * head_elements(a.cache_type, a.dim);
  for (int64_t t = 0; t < count;) {
    const int64_t position = first + t, within = position & (a.block_size - 1), end = std::min(count, t + a.block_size - within);
    const int64_t begin = ((static_cast<int64_t>(table[position >> shift]) << shift) + within - t) * width;
    for (; t < end; t++) at[t] = begin + t * width;
  }
}

thread_local Scratch scratch;

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_attention(const FlatoutAttention* attention) {
  using namespace flatout;
  if (!attention || !can(*attention)) return 1;
  const FlatoutAttention& a = *attention;
  const Kernels& k = kernels();
  int64_t jobs = 0;
  for (int64_t i = 0; i < a.count; i++) {
    if (a.kv_lens[a.rows[i]] < 1) return 1;
    jobs += pieces_of(a, i);
  }
  if (jobs == 0) return 0;
  struct Job {
    int32_t index, piece;
  };
  const int64_t heads = (a.heads + 15) / 16 * 16;  // of which a vector is read at a time
  const int64_t stride = 2 * heads + a.heads * (a.dim + kPiece);
  const bool tiles = amx::attends(a);
  const int64_t query = tiles ? amx::query_bytes(a) : 0;
  char* memory = scratch.at_least(static_cast<size_t>(a.count) * query + static_cast<size_t>(jobs) * (stride * sizeof(float) + sizeof(AttentionPiece) + sizeof(Job)));
  if (!memory) return 1;
  // what is read as vectors first
  const auto query_of = [&](int64_t index) { return reinterpret_cast<uint16_t*>(memory + index * query); };
  float* at = reinterpret_cast<float*>(memory + a.count * query);
  AttentionPiece* pieces = reinterpret_cast<AttentionPiece*>(at + jobs * stride);
  Job* job = reinterpret_cast<Job*>(pieces + jobs);
  int64_t n = 0;
  for (int64_t i = 0; i < a.count; i++) {
    for (int64_t p = 0; p < pieces_of(a, i); p++, n++, at += stride) {
      job[n] = {static_cast<int32_t>(i), static_cast<int32_t>(p)};
      pieces[n] = {at, at + heads, at + 2 * heads, at + 2 * heads + a.heads * a.dim};
    }
  }
  Turn turn;
  if (tiles) {
    share_ranges(a.count, a.count * query, kPartQueries, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) amx::lay_query(a, i, query_of(i));
    });
  }
  share_ranges(jobs, jobs, 1, [&](int64_t begin, int64_t end) {
    if (tiles) amx::begin(a);
    for (int64_t j = begin; j < end; j++) {
      const int64_t first = first_key(a, job[j].index) + job[j].piece * kPiece, keys = a.kv_lens[a.rows[job[j].index]];
      const int64_t count = std::min(kPiece, keys - first);
      int64_t at[kPiece];
      find(a, job[j].index, first, count, at);
      if (tiles) amx::attend(a, at, count, query_of(job[j].index), pieces[j]);
      else k.attend(a, job[j].index, at, count, pieces[j]);
    }
    if (tiles) amx::end();
  });
  share_ranges(a.count, jobs * a.heads * a.dim, kPartMerge, [&](int64_t begin, int64_t end) {
    int64_t j = 0;
    for (int64_t i = 0; i < begin; i++) j += pieces_of(a, i);
    for (int64_t i = begin; i < end; i++) {
      const int64_t count = pieces_of(a, i);
      k.merge(a, i, pieces + j, count);
      j += count;
    }
  });
  return 0;
}

FLATOUT_API int flatout_rotate(const FlatoutRotation* rotation) {
  using namespace flatout;
  if (!rotation || !can(*rotation)) return 1;
  const FlatoutRotation& r = *rotation;
  if (r.tokens == 0) return 0;
  const Kernels& k = kernels();
  Turn turn;
  share_ranges(r.tokens, r.tokens * (r.heads + r.kv_heads) * r.dim, kPartTokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) k.rotate(r, t);
  });
  return 0;
}
