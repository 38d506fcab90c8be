// By AMX: products of many rows (amx.cpp), which products.cpp asks for, attention of chunks (amx_attention.cpp) and of single queries
// (amx_decode.cpp), which attention.cpp asks for.

#ifndef FLATOUT_AMX_H
#define FLATOUT_AMX_H

#include "kernels.h"

namespace flatout {
namespace amx {

bool available();  // the processor has it, the system lets this process use it, and AVX-512's kernels are in use

constexpr int64_t padded(int64_t rows) { return (rows + 31) / 32 * 32; }  // rows of x that pair() reads

// x, or zeros where that is null, as row `row` of to, in tiles: bfloat16 [padded rows / 16][columns / 32][16][32]
void round_row(const float* x, int64_t columns, int64_t row, uint16_t* to);

int64_t scratch_bytes(int64_t rows, int64_t columns);  // of one pair(), aligned to 64

// Two blocks of 16 lines, or one where both are the same, of all rows x, as round_row() laid them out; with a gate its block and its up's.
void pair(const FlatoutProduct& product, const uint16_t* x, int64_t first, int64_t second, char* scratch);

int chunk(const FlatoutChunk& chunk);  // flatout_chunk(), where available()

// Single queries: whether attend() does them here, in place of the table's of kernels.h; the bytes of one row's query as lay_query() leaves it.
bool attends(const FlatoutAttention& attention);
int64_t query_bytes(const FlatoutAttention& attention);
void lay_query(const FlatoutAttention& attention, int64_t index, uint16_t* to);
// As the table's, between begin() and end(), which set this thread's tiles up and give them back.
void begin(const FlatoutAttention& attention);
void attend(const FlatoutAttention& attention, const int64_t* at, int64_t count, const uint16_t* query, const AttentionPiece& to);
void end();

}  // namespace amx
}  // namespace flatout

#endif
