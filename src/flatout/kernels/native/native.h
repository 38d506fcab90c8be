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

// float16 and int8: of a cache alone. A cache of int8 holds of each head of a token dim codes, then a float32 scale d: value = d * code.
enum { FLATOUT_FLOAT32 = 0, FLATOUT_BFLOAT16 = 1, FLATOUT_FLOAT16 = 2, FLATOUT_INT8 = 3 };
enum { FLATOUT_NO_GATE = 0, FLATOUT_SILU = 1, FLATOUT_GELU_TANH = 2, FLATOUT_GELU = 3 };

// out = [out +] scale * (x weight^T + bias), or with a gate [out +] scale * act(x gates^T + bias) * (x ups^T + bias').
// Where norm is given x is x * rsqrt(mean(x^2) + eps) * (norm + offset) in float32. Then rows are rounded, for kind 16 to bfloat16, for kind 32 not
// at all, for the packed kinds to int8 by groups of 32: d = max|x| / 127, or 0 where that is under 2^-100, and q = x / d to the nearest, ties to
// even; a group with anything but finite numbers makes its row's outputs NaN. Sums within such a group are exact, all others float32. A row has
// the same bits in any company and with any number of threads. out may be x.
//
// With `many` rows and packed weights are rounded to bfloat16 instead, plain ones of kind 16 are taken as they are (in whole blocks of 16 lines and 32
// columns), and sums are float32: for many rows, where flatout_has_tiles() says so. Kind 32: not.
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
  int32_t many;
  float eps, offset, scale;
} FlatoutProduct;

// 0, or 1 for what it cannot do: nothing is written then.
FLATOUT_API int flatout_product(const FlatoutProduct* product);

// Whether the machine has matrix tiles (AMX), which products of many rows take.
FLATOUT_API int flatout_has_tiles(void);

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
  const int32_t* table_rows; // [rows]: which of the tables each row has, or null: its own
  const int32_t* rows;       // [count]: which of the rows
  const int32_t* tokens;     // [count]: whose query each is
  int64_t q_stride, out_stride, table_stride;  // elements
  int64_t count;
  int32_t heads;     // at most 8 to a KV head
  int32_t kv_heads;
  int32_t dim;       // a multiple of 16, at most 256
  int32_t block_size;  // a power of two
  int32_t window;    // keys that are seen, or 0: all
  int32_t type;      // of q and out
  int32_t cache_type;  // of k and v: the same, 16 bits beside float32, or int8
  float scale, softcap;  // softcap 0: none
} FlatoutAttention;

// 0, or 1 for what it cannot do. A row has the same bits in any company and with any number of threads.
FLATOUT_API int flatout_attention(const FlatoutAttention* attention);

// Neighbouring queries of one row, the last of which sees the last key and each before it a key less: out = softmax(scale * q k^T) v, with queries,
// keys, values and weights as bfloat16, sums in float32. With an int8 cache, whose codes are exact in bfloat16, queries and weights of float32 are
// taken in three parts of bfloat16 each, so that nothing is rounded but in float32. Where flatout_has_tiles() says so.
typedef struct {
  const void* q;  // [count][heads][dim]
  const void* k;  // [slots][kv_heads][dim]
  const void* v;
  void* out;                      // [count][heads * dim]
  const int64_t* slots;           // [keys]: where they are, or null: one after the other
  int64_t first_slot;             // from here on
  int64_t q_stride, out_stride;   // elements
  int64_t count, keys;            // keys: at least count
  int32_t heads, kv_heads;
  int32_t dim;         // a multiple of 32, at most 256
  int32_t window;      // keys that are seen, or 0: all
  int32_t type;        // of q and out
  int32_t cache_type;  // float16, bfloat16 or int8
  float scale;
} FlatoutChunk;

FLATOUT_API int flatout_chunk(const FlatoutChunk* chunk);

// Queries and keys normed (head by head) and rotated where they lie; then keys and values to their slots of the cache. To int8 a head is rounded by
// d = max|x| / 127, or 0 where that is under 2^-100, to the nearest, ties to even; one with anything but finite numbers becomes NaN.
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
  int32_t type;                   // of all of it but the cache
  int32_t cache_type;             // the same, 16 bits beside float32, or int8
  float eps, offset;
} FlatoutRotation;

FLATOUT_API int flatout_rotate(const FlatoutRotation* rotation);

// GGUF's block types by ggml's numbers: a line of a weight is blocks one after the other, as ggml defines them.
enum {
  FLATOUT_Q4_0 = 2,
  FLATOUT_Q4_1 = 3,
  FLATOUT_Q5_0 = 6,
  FLATOUT_Q5_1 = 7,
  FLATOUT_Q8_0 = 8,
  FLATOUT_Q4_K = 12,
  FLATOUT_Q5_K = 13,
  FLATOUT_Q6_K = 14
};

// A weight of blocks [lines][columns] as a packed one of kind 4 or 8, by the caller's thread alone. Line i of it is line order[i] of the source.
// Of kind 8 other types than Q4_0, Q5_0 and Q8_0 are rounded again: the largest magnitude of a group is 127 scales. Of kind 4 it
// takes Q4_0, Q4_1 and Q4_K. 0; 1 for what it cannot do, when nothing is written; or 2: a scale or minimum that float16 does not hold.
FLATOUT_API int flatout_repack(const uint8_t* source, int32_t format, const int64_t* order, int64_t lines, int64_t columns, int32_t kind,
                               uint8_t* out);

// out [rows][width] = scale * the float32 values of line indices[row], which are rounded to the type of out before they are scaled.
typedef struct {
  const uint8_t* source;   // [lines][width]
  const int64_t* indices;  // [rows], each one of the source's lines
  void* out;
  int64_t out_stride;  // elements
  int64_t rows, width, lines;
  int32_t format;  // of blocks, or -4 or -8: a packed weight of that kind
  int32_t type;    // of out
  float scale;
} FlatoutEmbed;

FLATOUT_API int flatout_embed(const FlatoutEmbed* embed);

// out [rows][width] = scale * source[indices[row]].
typedef struct {
  const void* source;      // [source_rows][width]
  const int64_t* indices;  // [rows], each one of the source's rows
  void* out;
  int64_t source_stride, out_stride;  // elements
  int64_t rows, width, source_rows;
  int32_t type;  // of source and out
  float scale;
} FlatoutGather;

FLATOUT_API int flatout_gather(const FlatoutGather* gather);

// ids[row] = where the row's largest logit is, the first among equals. NaN counts as the lowest finite number, +inf as the highest.
typedef struct {
  const float* logits;  // [rows][width]
  int64_t* ids;
  int64_t stride, rows, width;
} FlatoutGreedy;

FLATOUT_API int flatout_greedy(const FlatoutGreedy* greedy);

// The inputs of `count` rows of one token each from what was staged for them: kernels/inputs.py says what is where.
typedef struct {
  int64_t *tokens, *positions, *kv_slots;
  int32_t *kv_lens, *rows;
  int32_t* tables;          // [slots][width]
  const int32_t* staged;    // [1 + 3 count + 3 diffs]
  const int64_t* last_ids;  // [slots]
  int64_t count, diffs, slots, width;
  int32_t block_size;
  int32_t from_device;  // the id that means the slot's last one
} FlatoutInputs;

FLATOUT_API int flatout_inputs(const FlatoutInputs* inputs);

// last_ids[rows[i]] = ids[i]
typedef struct {
  int64_t* last_ids;    // [slots]
  const int32_t* rows;  // [count]
  const int64_t* ids;
  int64_t count, slots;
} FlatoutRemember;

FLATOUT_API int flatout_remember(const FlatoutRemember* remember);

// What stands between a block of the decoder and its products, row by row; rows are float32 or bfloat16, all of one type, sums float32.
//
// out = x * rsqrt(mean(x^2) + eps) * (weight + offset); without an offset x is rounded to its type before it meets the weight. out may be x.
typedef struct {
  const void* x;       // [rows][width]
  const void* weight;  // [width]
  void* out;
  int64_t x_stride, out_stride, rows;
  int64_t width;  // a multiple of 16
  int32_t type;
  float eps, offset;
} FlatoutNorm;

FLATOUT_API int flatout_norm(const FlatoutNorm* norm);

// out += scale * x, or with gates out += scale * sigmoid(gate of the row) * x.
typedef struct {
  const void* x;      // [rows][width]
  const void* gates;  // [rows], gate_stride apart, or null
  void* out;
  int64_t x_stride, gate_stride, out_stride, rows, width;
  int32_t type;
  float scale;
} FlatoutAdd;

FLATOUT_API int flatout_add(const FlatoutAdd* add);

// out [rows][width] = act(x[row][0 ... width - 1]) * x[row][width ... 2 width - 1].
typedef struct {
  const void* x;
  void* out;
  int64_t x_stride, out_stride, rows, width;
  int32_t type;
  int32_t gate;
} FlatoutGate;

FLATOUT_API int flatout_gate(const FlatoutGate* gate);

// The top_k of each row's softmax in float32: the largest logits, the lowest number first among equals, NaN after all finite ones.
// A row with NaN or +inf, or with nothing but -inf, has weights of NaN.
typedef struct {
  const void* logits;  // [rows][experts]
  float* weights;      // [rows][top_k]
  int64_t* chosen;     // [rows][top_k]
  int64_t stride, rows;
  int32_t experts;  // at most 1024
  int32_t top_k;
  int32_t type;         // of the logits, float32 or bfloat16
  int32_t renormalise;  // a row's weights sum to 1
} FlatoutRoute;

FLATOUT_API int flatout_route(const FlatoutRoute* route);

// out [tokens][hidden] = for each token the sum over its experts, in the order of choice, of weight * down(act(gate(x)) * up(x)): products as
// flatout_product makes them, what is between them float32. A token has the same bits in any company and with any number of threads.
typedef struct {
  const void* x;         // [tokens][hidden]
  const void* gate_up;   // [experts], weights of 2 * width lines and hidden columns, gates first
  const void* down;      // [experts], weights of hidden lines and width columns
  const float* weights;  // [tokens][top_k]
  const int64_t* chosen; // [tokens][top_k]
  void* out;
  int64_t x_stride, out_stride, tokens, hidden, width, experts, top_k;
  int32_t type;  // of x and out
  int32_t gate_up_kind, down_kind;
  int32_t gate;
  int32_t many;  // as a product's, of all rows: a token's bits are then those of its experts' products by bfloat16
} FlatoutExperts;

FLATOUT_API int flatout_experts(const FlatoutExperts* experts);

// A program: calls of the functions above, in order.
enum {
  FLATOUT_CALL_PRODUCT = 0,
  FLATOUT_CALL_ATTENTION = 1,
  FLATOUT_CALL_ROTATE = 2,
  FLATOUT_CALL_GATHER = 3,
  FLATOUT_CALL_GREEDY = 4,
  FLATOUT_CALL_INPUTS = 5,
  FLATOUT_CALL_REMEMBER = 6,
  FLATOUT_CALL_CHUNK = 7,
  FLATOUT_CALL_NORM = 8,
  FLATOUT_CALL_ADD = 9,
  FLATOUT_CALL_GATE = 10,
  FLATOUT_CALL_ROUTE = 11,
  FLATOUT_CALL_EXPERTS = 12,
  FLATOUT_CALL_EMBED = 13
};

typedef struct {
  int64_t function;
  const void* operands;
} FlatoutCall;

// Makes the calls; with `ns` ([count]) their nanoseconds are added there. Answers how many it made: fewer where one was refused, which ends it.
FLATOUT_API int64_t flatout_run(const FlatoutCall* calls, int64_t count, int64_t* ns);

// How many threads to use, the caller's among them; answers how many it will be. Any thread may call into the library; products take turns.
FLATOUT_API int flatout_threads(int n);

// The instruction set in use: "avx512_vnni", "avx2" or "scalar". At first the best that the machine has.
FLATOUT_API const char* flatout_isa(void);

// Take another one: 0, or 1 where the machine lacks it.
FLATOUT_API int flatout_use_isa(const char* name);

#endif
