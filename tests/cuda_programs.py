"""Small kernels in CUDA C++ for the tests of kernels/gpu/cuda.py: what tests/gpu launches, tests/kernels compiles where NVRTC is and no GPU."""

from __future__ import annotations

from flatout.kernels.gpu.cuda import Program

AXPY = Program(
    """
extern "C" __global__ void axpy(float* y, const float* x, const float* bias, int n, float a) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = a * x[i] + (bias ? bias[i] : y[i]);
}
""",
    "axpy",
    "pppif",
)

# y += 1, begun while the kernel before ends
NEXT = Program(
    """
extern "C" __global__ void next(int* y, int n) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += 1;
}
""",
    "next",
    "pi",
)

# the size of the cluster that a program is of, and its place in the grid
PLACE = Program(
    """
extern "C" __global__ void place(int* out) {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  int program = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[program * 4] = size, out[program * 4 + 1] = blockIdx.x, out[program * 4 + 2] = blockIdx.y, out[program * 4 + 3] = blockIdx.z;
}
""",
    "place",
    "p",
)

_FETCH = """
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(128) Map { char bytes[128]; };

__device__ __forceinline__ u32 address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrived(u32 barrier) {
  asm volatile("{\\n.reg .pred p;\\nWAIT:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n@p bra DONE;\\nbra WAIT;\\nDONE:\\n}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
"""

# Every program of a cluster fetches its part of the box's rows for all of them; each writes the box that it has then, at its place in out.
# Macros: ROWS, BYTES of a row of the box; SWIZZLE; CLUSTER.
BOX = Program(
    _FETCH
    + """
extern "C" __global__ void box(const int before, const __grid_constant__ Map map, uint4* out, int row, int column, float after) {
  extern __shared__ char raw[];
  __shared__ u64 barrier;
  char* held = raw + (-address(raw) & 1023);
  constexpr int PART = ROWS / CLUSTER;
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) expect(address(&barrier), ROWS * BYTES);
  meet();
  const u32 to = address(held + rank * PART * BYTES);
  row += rank * PART;
#if CLUSTER > 1
  if (threadIdx.x == 0)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(address(&barrier)), "r"(column), "r"(row), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
#else
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map),
                 "r"(address(&barrier)), "r"(column), "r"(row)
                 : "memory");
#endif
  arrived(address(&barrier));
  if (before != 7 || after != 0.5f) return;  // parameters on both sides of the map are where they should be
  for (int i = threadIdx.x; i < ROWS * BYTES / 16; i += blockDim.x) {
    int r = i / (BYTES / 16), unit = i % (BYTES / 16);
    out[blockIdx.x * (ROWS * BYTES / 16) + i] = reinterpret_cast<uint4*>(held + r * BYTES)[SWIZZLE ? unit ^ (r & 7) : unit];
  }
  meet();
}
""",
    "box",
    "impiif",
)

# out [64, 8] float32 = a [64, 64] @ b [8, 64]^T in bfloat16, by one warpgroup
PRODUCT = Program(
    _FETCH
    + """
__device__ __forceinline__ u64 matrix(u32 at) { return (u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16) | ((at & 0x3FFFF) >> 4); }

extern "C" __global__ void __launch_bounds__(128) product(const __grid_constant__ Map a, const __grid_constant__ Map b, float* out) {
  extern __shared__ char raw[];
  __shared__ u64 barrier;
  const u32 held = (address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    expect(address(&barrier), (64 + 8) * 128);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];" ::"r"(held), "l"(&a),
                 "r"(address(&barrier))
                 : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];" ::"r"(held + 64 * 128),
                 "l"(&b), "r"(address(&barrier))
                 : "memory");
  }
  __syncthreads();
  arrived(address(&barrier));
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; k++)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(matrix(held) + k * 2), "l"(matrix(held + 64 * 128) + k * 2));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}
""",
    "product",
    "mmp",
)

ALL = {
    "axpy": (AXPY, {}),
    "next": (NEXT, {}),
    "place": (PLACE, {}),
    "box": (BOX, {"ROWS": 16, "BYTES": 128, "SWIZZLE": 1, "CLUSTER": 1}),
    "box for two": (BOX, {"ROWS": 16, "BYTES": 128, "SWIZZLE": 1, "CLUSTER": 2}),
    "product": (PRODUCT, {}),
}
