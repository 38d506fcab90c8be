// What the products in CUDA C++ share: two 16-bit values to a word, and what a gate does. Put before a kernel's text by cuda.py's text_of().
//
//   BF16   or float16        GATE   0 none, 1 silu, 2 gelu by tanh, 3 gelu

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

__device__ __forceinline__ float2 unpack(u32 v) {
#if BF16
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
#else
  float low, high;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(v));
  return make_float2(low, high);
#endif
}

__device__ __forceinline__ float gated(float g, float up) {
  if (GATE == 1) return g / (1.0f + __expf(-g)) * up;
  if (GATE == 2) return 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * up;
  return 0.5f * g * (1.0f + erff(0.7071067811865476f * g)) * up;
}
