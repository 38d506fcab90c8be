// The C ABI of flatout's CPU kernels: all that leaves this library, mirrored by native/__init__.py through ctypes. No Python, no torch.
//
// A weight is plain or packed. Plain it is as torch has it, [lines][columns], a line (an output) after the other: kind 16 of bfloat16, kind 32 of
// float32. Packed are 16 lines together, [lines / 16][columns / 32][bytes], so that a vector holds 4 elements of each of 16 lines:
//   kind 4, 320 bytes: byte[64c + 4r + j] (c < 4, line r, j < 4) has element 4c + j in its low and 16 + 4c + j in its high half; then 16
//     float16 scales d and 16 float16 minima m: value = d * q + m
//   kind 8, 544 bytes: byte[64c + 4r + j] (c < 8) is element 4c + j; then 16 float16 scales d: value = d * (byte - 128)

#ifndef FLATOUT_NATIVE_H
#define FLATOUT_NATIVE_H

#include <stdint.h>

#ifdef __cplusplus
#define FLATOUT_API extern "C" __attribute__((visibility("default")))
#else
#define FLATOUT_API
#endif

enum { FLATOUT_FLOAT32 = 0, FLATOUT_BFLOAT16 = 1 };
enum { FLATOUT_NO_GATE = 0, FLATOUT_SILU = 1, FLATOUT_GELU_TANH = 2, FLATOUT_GELU = 3 };

// out = [out +] scale * (x weight^T + bias), or with a gate [out +] scale * act(x gates^T + bias) * (x ups^T + bias').
// Where norm is given x is x * rsqrt(mean(x^2) + eps) * (norm + offset) in float32. Then rows are rounded, for kind 16 to bfloat16, for kind 32 not
// at all, for the packed kinds to int8 by groups of 32: d = max|x| / 127, or 0 where that is under 2^-100, and q = x / d to the nearest, ties to
// even; a group with anything but finite numbers makes its row's outputs NaN. Sums within such a group are exact, all others float32. A row has
// the same bits in any company and with any number of threads. out may be x.
typedef struct {
  const void* x;          // [rows][columns]
  const void* weight;     // with a gate the gates' lines are followed by as many of the ups
  const void* bias;       // one for each line, or null
  const void* norm;       // [columns], or null
  void* out;              // [rows][outputs]
  int64_t x_stride, out_stride;  // elements from row to row
  int64_t rows;
  int64_t outputs;  // of packed weights a multiple of 16
  int64_t columns;  // of packed weights a multiple of 32, of plain ones of 16
  int32_t x_type, out_type, bias_type, norm_type;
  int32_t kind;  // 4, 8, 16 or 32
  int32_t gate;
  int32_t add;
  float eps, offset, scale;
} FlatoutProduct;

// 0, or 1 for what it cannot do: nothing is written then.
FLATOUT_API int flatout_product(const FlatoutProduct* product);

// out [lines][columns] = a packed weight's values, for products of many rows by another library. Answers as flatout_product does.
FLATOUT_API int flatout_dequantise(const uint8_t* weight, int32_t kind, int64_t lines, int64_t columns, void* out, int64_t out_stride,
                                   int32_t out_type);

// Rows with one query each, against keys and values where they lie in the cache: out = softmax(scale * q k^T) v, capped if asked.
typedef struct {
  const void* q;  // [tokens][heads][dim]
  const void* k;  // [slots][kv_heads][dim]
  const void* v;
  void* out;                 // [tokens][heads * dim]
  const int32_t* tables;     // [rows][table_stride]: blocks in order
  const int32_t* kv_lens;    // [rows]: at least 1
  const int32_t* rows;       // [count]: which of the rows
  const int32_t* tokens;     // [count]: whose query each is
  int64_t q_stride, out_stride, table_stride;  // elements
  int64_t count;
  int32_t heads;     // at most 8 to a KV head
  int32_t kv_heads;
  int32_t dim;       // a multiple of 16, at most 256
  int32_t block_size;
  int32_t window;    // keys that are seen, or 0: all
  int32_t type;      // of q, k, v and out
  float scale, softcap;  // softcap 0: none
} FlatoutAttention;

// 0, or 1 for what it cannot do. A row has the same bits in any company and with any number of threads.
FLATOUT_API int flatout_attention(const FlatoutAttention* attention);

// Queries and keys normed (head by head) and rotated where they lie; then keys and values to their slots of the cache.
typedef struct {
  void* qk;           // [tokens][heads + kv_heads][dim]
  const void* value;  // [tokens][kv_heads][dim], rows value_stride apart
  void* k_cache;      // [slots][kv_heads][dim]
  void* v_cache;
  const int64_t* slots;           // [tokens]
  const void *cos, *sin;          // [tokens][rotary], rows turn_stride apart, sin negated in its first half; null: no rotation
  const void *q_norm, *k_norm;    // [dim], or null
  int64_t tokens, stride, value_stride, turn_stride;
  int32_t heads, kv_heads, dim;   // dim a multiple of 16
  int32_t rotary;                 // a multiple of 32
  int32_t type;                   // of all of it
  float eps, offset;
} FlatoutRotation;

FLATOUT_API int flatout_rotate(const FlatoutRotation* rotation);

// How many threads to use, the caller's among them; answers how many it will be. Any thread may call into the library; products take turns.
FLATOUT_API int flatout_threads(int n);

// The instruction set in use: "avx512_vnni", "avx2" or "scalar". At first the best that the machine has.
FLATOUT_API const char* flatout_isa(void);

// Take another one: 0, or 1 where the machine lacks it.
FLATOUT_API int flatout_use_isa(const char* name);

#endif
