// A product of up to 16 16-bit rows with a 16-bit weight: out = x @ weight^T, normed rows, bias, gate or residual add included.
//
// A warp has TILES times 8 outputs and a share of the columns. It streams its part of the weight through a ring of its own in shared memory
// (cp.async, 64 columns a stage) and multiplies by mma, x being the first operand, so that 8 outputs are work enough for an instruction; nobody
// waits for another warp before the end. All programs are on the device at once, each with the same to read. In C++ as Triton 3.6 has a barrier
// of the whole program in each stage, and its first stage waits for the kernel before. Compiled by cuda.py behind product_parts.cu; streaming.py
// launches it and chooses the sizes. Nothing else lives here.
//
//   TILES    of 8 outputs for a warp; gated: half of them gates, half ups       ROWS   8 or 16, of x          ADD    out += scale * product
//   WARPS    of a program, which share the columns of its outputs               NORM   rows are normed        WIDE   out is float32
//   STAGES   of 64 columns on their way

constexpr int HALVES = GATE ? 2 : 1;
constexpr int OUT = TILES * 8 / HALVES;  // outputs of a program
constexpr int STAGE = TILES * 1024, RING = STAGES * STAGE;  // bytes
constexpr int LINE = TILES * 8 + 2;  // floats of a row of a warp's sums; the last: of its squares
static_assert(TILES % HALVES == 0, "as many gates as ups");
static_assert(ROWS * LINE * 4 <= RING, "sums lie where the stages lay");

// Of the L2 out at once; without that, or with the neighbouring line asked for as well, a step of 8 rows of 7B takes 5 us a layer more and above.
__device__ __forceinline__ void fetch(u32 to, const char* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ uint4 of_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint4 of_global(const char* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

// 16 rows, of which the upper 8 are zeros where a1 and a3 are, by 8 outputs
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// two values times their norm's weights; adds their squares up
__device__ __forceinline__ u32 normed(u32 x, u32 norm, float offset, float& squares) {
  const float2 v = unpack(x), n = unpack(norm);
  squares += v.x * v.x;
  squares += v.y * v.y;
  return pack(v.x * (n.x + offset), v.y * (n.y + offset));
}

__device__ __forceinline__ uint4 normed(uint4 x, uint4 norm, float offset, float& squares) {
  return make_uint4(normed(x.x, norm.x, offset, squares), normed(x.y, norm.y, offset, squares), normed(x.z, norm.z, offset, squares),
                    normed(x.w, norm.w, offset, squares));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    product(const char* x, const char* weight, char* out, const u32* bias, const char* norm, int rows, int outputs, int columns, int x_stride, int weight_stride,
            int out_stride, float eps, float offset, float scale) {
  extern __shared__ __align__(128) char raw[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int all_steps = columns / 64, begin = all_steps * warp / WARPS, steps = all_steps * (warp + 1) / WARPS - begin;
  const u32 ring = static_cast<u32>(__cvta_generic_to_shared(raw)) + warp * RING;

  // A stage of a tile: 8 rows of 128 bytes. Fetched a quarter of a kibibyte's lines at a time, eight lanes to a row; pieces of 16 bytes of odd rows
  // are turned by half a row, so that neither these writes nor the reads below meet in a bank.
  const int fetched = lane / 8, piece = lane % 8;
  const u32 first = ring + fetched * 128 + ((piece ^ ((fetched & 1) << 2)) << 4);
  u32 to = first;  // carried and not worked out of the step: ptxas 13.0 makes an illegal instruction of a uniform offset beside a policy
  const char* from[TILES];
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int half = tile / (TILES / HALVES), output = min(blockIdx.x * OUT + tile % (TILES / HALVES) * 8, outputs - 8) + half * outputs;
    from[tile] = weight + ((long long)(output + fetched) * weight_stride + begin * 64) * 2 + piece * 16;
  }
  const long long four_rows = (long long)weight_stride * 8;
  auto fetch_stage = [&]() {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      fetch(to + tile * 1024, from[tile], policy);
      fetch(to + tile * 1024 + 512, from[tile] + four_rows, policy);
      from[tile] += 128;
    }
    to = to == first + RING - STAGE ? first : to + STAGE;
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) fetch_stage();
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // columns 8 * (t + 4 * j) on are an operand's of lane 4 * g + t, in whatever order they are added: those of 16 bytes as they lie
  const int g = lane / 4, t = lane % 4;
  const u32 w_at = ring + g * 128 + ((t + 4 * (g & 1)) << 4), turn = 64 - 128 * (g & 1);
  const char* x_at[ROWS / 8];
#pragma unroll
  for (int h = 0; h < ROWS / 8; h++) x_at[h] = x + ((long long)min(g + 8 * h, rows - 1) * x_stride + begin * 64) * 2 + t * 16;
  const char* norm_at = norm + begin * 128 + t * 16;
  float acc[TILES][4] = {}, squares[ROWS / 8] = {};
  uint4 xs[ROWS / 8][2] = {}, ns[2] = {};
  auto read = [&](int step) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int h = 0; h < ROWS / 8; h++) xs[h][j] = of_global(x_at[h] + step * 128 + j * 64);
      if (NORM) ns[j] = of_global(norm_at + step * 128 + j * 64);
    }
  };
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (steps > 0) read(0);
  for (int step = 0; step < steps; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    if (step + STAGES - 1 < steps) fetch_stage();
    asm volatile("cp.async.commit_group;" ::: "memory");
    uint4 a[ROWS / 8][2];
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
      for (int j = 0; j < 2; j++) a[h][j] = NORM ? normed(xs[h][j], ns[j], offset, squares[h]) : xs[h][j];
    if (step + 1 < steps) read(step + 1);
    const u32 at = w_at + step % STAGES * STAGE;
    uint4 w[2][TILES];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) w[j][tile] = of_shared(at + tile * 1024 + j * turn);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint4 low = a[0][j], high = ROWS > 8 ? a[ROWS / 8 - 1][j] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        multiply(acc[tile], low.x, high.x, low.y, high.y, w[j][tile].x, w[j][tile].y);
        multiply(acc[tile], low.z, high.z, low.w, high.w, w[j][tile].z, w[j][tile].w);
      }
    }
  }

  // a warp's sums go where its stages lay, then every thread adds up two neighbours of a row over the warps
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  float* sums = reinterpret_cast<float*>(raw + warp * RING);
#pragma unroll
  for (int h = 0; h < ROWS / 8; h++) {
    float* line = sums + (g + 8 * h) * LINE;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) *reinterpret_cast<float2*>(line + tile * 8 + t * 2) = make_float2(acc[tile][2 * h], acc[tile][2 * h + 1]);
    if (NORM) {
      float s = squares[h];
      s += __shfl_xor_sync(~0u, s, 1);
      s += __shfl_xor_sync(~0u, s, 2);
      if (t == 0) line[TILES * 8] = s;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * OUT / 2; i += 32 * WARPS) {
    const int row = i / (OUT / 2), c = i % (OUT / 2) * 2, col = blockIdx.x * OUT + c;
    if (row >= rows || col >= outputs) continue;
    float2 v[HALVES] = {};
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* line = reinterpret_cast<const float*>(raw + w * RING) + row * LINE;
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const float2 more = *reinterpret_cast<const float2*>(line + h * OUT + c);
        v[h].x += more.x, v[h].y += more.y;
      }
      if (NORM) square += line[TILES * 8];
    }
    const float by = NORM ? rsqrtf(square / columns + eps) : 1.0f;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const float2 b = bias != nullptr ? unpack(bias[(h * outputs + col) >> 1]) : make_float2(0.0f, 0.0f);
      v[h] = make_float2(v[h].x * by + b.x, v[h].y * by + b.y);
    }
    float2 y = GATE ? make_float2(gated(v[0].x, v[HALVES - 1].x), gated(v[0].y, v[HALVES - 1].y)) : v[0];
    const long long at = (long long)row * out_stride + col;
    if (WIDE) {
      *reinterpret_cast<float2*>(out + at * 4) = y;
    } else {
      u32* place = reinterpret_cast<u32*>(out + at * 2);
      if (ADD) {
        const float2 old = unpack(*place);
        y = make_float2(old.x + scale * y.x, old.y + scale * y.y);
      }
      *place = pack(y.x, y.y);
    }
  }
}
