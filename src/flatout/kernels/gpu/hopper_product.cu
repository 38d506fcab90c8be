// A product of up to 192 16-bit rows with a 16-bit weight on sm_90a: out = x @ weight^T, with bias, gate or residual add in the epilogue.
//
// All rows lie in one tile, so that the weight is read once. One producer warp fetches tiles by TMA, WGS warpgroups of 64 rows each multiply them
// (wgmma) from a ring of STAGES in shared memory. What Triton 3.6 has no words for, and why this is C++: a cluster's programs share the columns of
// one tile and add up through each other's shared memory; and weights are fetched before the kernel before has ended while x is waited for.
// Compiled at run time by cuda.py with the sizes below as macros, behind wgmma() of hopper.py, which launches it. Nothing else lives here.
//
//   TN       rows of the weight in a tile; gated: half of them of the gate, half of up        CLUSTER   programs that share a tile's columns
//   WGS      warpgroups                                                                       GATE      0 none, 1 silu, 2 gelu by tanh, 3 gelu
//   STAGES   tiles of 64 columns on their way                                                 ADD       out += scale * product
//   BF16     or float16

constexpr int TM = 64 * WGS;
constexpr int OUT = GATE ? TN / 2 : TN;  // columns of out in a tile
constexpr int X_BYTES = TM * 128, W_BYTES = TN * 128, STAGE = X_BYTES + W_BYTES;
constexpr int HALVES = GATE ? 2 : 1;
constexpr u64 FIRST_OUT = 0x12F0000000000000ull, LAST_OUT = 0x14F0000000000000ull;  // of the L2: the weight is read once, x by every program
constexpr int LINE = TN + 4;  // floats of a row of partial sums
static_assert(CLUSTER == 1 || TM * LINE * 4 <= STAGES * STAGE, "partial sums lie where the stages lay");
static_assert(TN / HALVES % 8 == 0, "whole swizzled blocks");

struct alignas(128) Map {
  char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

__device__ __forceinline__ void cluster_meet() {
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  } else {
    __syncthreads();
  }
}

__device__ __forceinline__ void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }

__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(at), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }

__device__ __forceinline__ void fetch(u32 to, const Map* map, int column, int row, u32 barrier, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map),
      "r"(barrier), "r"(column), "r"(row), "l"(hint)
      : "memory");
}

// rows of 128 bytes, swizzled in blocks of 8 rows
__device__ __forceinline__ u64 matrix(u32 address) { return (u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16) | ((address & 0x3FFFF) >> 4); }

// two neighbouring results
__device__ __forceinline__ void put(u32* out, float2 v, long long at, float scale) {
  if (ADD) {
    float2 old = unpack(out[at >> 1]);
    v.x = old.x + scale * v.x, v.y = old.y + scale * v.y;
  }
  out[at >> 1] = pack(v.x, v.y);
}

// the sums of two neighbouring columns of one row, biased and gated
__device__ __forceinline__ float2 finished(const float* acc, int i, float2 bias, float2 up_bias) {
  float2 v = make_float2(acc[i] + bias.x, acc[i + 1] + bias.y);
  if (GATE) v = make_float2(gated(v.x, acc[TN / 4 + i] + up_bias.x), gated(v.y, acc[TN / 4 + i + 1] + up_bias.y));
  return v;
}

extern "C" __global__ void __launch_bounds__(128 * (WGS + 1), 1)
    product(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, u32* out, const u32* bias, int rows, int outputs, int columns, int out_stride,
            float scale) {
  extern __shared__ char raw[];
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  const u32 full = base + STAGES * STAGE, empty = full + 8 * STAGES;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int units = (outputs + OUT - 1) / OUT, clusters = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER;
  const int all_steps = (columns + 63) / 64, share = (all_steps + CLUSTER - 1) / CLUSTER;
  const int begin = rank * share, end = min(begin + share, all_steps);

  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, WGS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_meet();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == WGS) {
    if (WGS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 40 : 32));
    if (threadIdx.x % 128 == 0) {
      auto weights = [&](int s, int k, int output) {
        for (int h = 0; h < HALVES; h++)
          fetch(base + s * STAGE + X_BYTES + h * (TN / HALVES) * 128, &w_map, k * 64, h * outputs + output, full + 8 * s, FIRST_OUT);
      };
      const int ahead = min(STAGES, end - begin);
      for (int step = 0; step < ahead; step++) {  // the first stages' weights, which nothing before this kernel writes
        barrier_expect(full + 8 * step, STAGE);
        weights(step, begin + step, first * OUT);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      int step = 0;
      for (int unit = first; unit < units; unit += clusters)
        for (int k = begin; k < end; k++, step++) {
          const int s = step % STAGES;
          if (step >= ahead) {
            barrier_wait(empty + 8 * s, ((step / STAGES) & 1) ^ 1);
            barrier_expect(full + 8 * s, STAGE);
            weights(s, k, unit * OUT);
          }
          fetch(base + s * STAGE, &x_map, k * 64, 0, full + 8 * s, LAST_OUT);
        }
    }
  } else {
    if (WGS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 232 : 160));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int line = warpgroup * 64 + (thread / 32) * 16 + lane / 4, pair = (lane % 4) * 2;
    int step = 0;
    for (int unit = first; unit < units; unit += clusters) {
      float acc[TN / 2];
      for (int k = begin; k < end; k++, step++) {
        const int s = step % STAGES;
        barrier_wait(full + 8 * s, (step / STAGES) & 1);
        const u64 a = matrix(base + s * STAGE + warpgroup * 8192), b = matrix(base + s * STAGE + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma(acc, a + i * 2, b + i * 2, k > begin || i > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k > begin) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (thread == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES));
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (end > begin && thread == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES));
#pragma unroll
      for (int i = 0; i < TN / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");  // not read before the wait

      if (CLUSTER > 1) {
        // every consumer of this program is through with the stages: their place takes the sums
        asm volatile("bar.sync 1, %0;" ::"n"(128 * WGS) : "memory");
#pragma unroll
        for (int j = 0; j < TN / 8; j++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const bool any = end > begin;
            float x = any ? acc[j * 4 + half * 2] : 0.0f, y = any ? acc[j * 4 + half * 2 + 1] : 0.0f;
            u32 to = base + ((line + half * 8) * LINE + j * 8 + pair) * 4;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
          }
      } else {
#pragma unroll
        for (int j = 0; j < OUT / 8; j++) {
          const int col = unit * OUT + j * 8 + pair;
          if (col >= outputs) break;
          float2 b = make_float2(0.0f, 0.0f), up = b;
          if (bias != nullptr) {
            b = unpack(bias[col >> 1]);
            if (GATE) up = unpack(bias[(outputs + col) >> 1]);
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int r = line + half * 8;
            if (r < rows) put(out, finished(acc, j * 4 + half * 2, b, up), (long long)r * out_stride + col, scale);
          }
        }
      }
    }
  }

  if (CLUSTER > 1) {  // such a program has one tile
    cluster_meet();   // every program's sums are there
    constexpr int MINE = TM / CLUSTER;  // rows that this program adds up, four columns at a time, the programs in their order
    for (int i = threadIdx.x; i < MINE * (OUT / 4); i += 128 * (WGS + 1)) {
      const int r = rank * MINE + i / (OUT / 4), c = i % (OUT / 4) * 4, col = first * OUT + c;
      float4 sum[2] = {};
#pragma unroll
      for (int q = 0; q < CLUSTER; q++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
          float4 v;
          asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                       : "r"(in_program(base + (r * LINE + h * OUT + c) * 4, q))
                       : "memory");
          sum[h].x += v.x, sum[h].y += v.y, sum[h].z += v.z, sum[h].w += v.w;
        }
      if (r >= rows || col >= outputs) continue;
      if (bias != nullptr)
        for (int h = 0; h < HALVES; h++) {
          float2 low = unpack(bias[(h * outputs + col) >> 1]), high = unpack(bias[((h * outputs + col) >> 1) + 1]);
          sum[h].x += low.x, sum[h].y += low.y, sum[h].z += high.x, sum[h].w += high.y;
        }
      float4 v = sum[0];
      if (GATE) v = make_float4(gated(v.x, sum[1].x), gated(v.y, sum[1].y), gated(v.z, sum[1].z), gated(v.w, sum[1].w));
      const long long at = (long long)r * out_stride + col;
      put(out, make_float2(v.x, v.y), at, scale);
      put(out, make_float2(v.z, v.w), at + 2, scale);
    }
    cluster_meet();  // nobody's shared memory is read after it has ended
  }
}
