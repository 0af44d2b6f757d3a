// golden
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;

static __device__ uint32_t bits_of(float x) { return __float_as_uint(x); }
static __device__ float float_of(uint32_t u) { return __uint_as_float(u); }
static __device__ double double_of(int64_t u) { return __longlong_as_double(u); }

static __device__ float bf16_to_f32(uint16_t h) { return float_of(uint32_t(h) << 16); }

static __device__ uint16_t f32_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0u) : uint16_t(rounded);
}

// The exponent is moved by a multiplication, which also normalises subnormal halves.
static __device__ float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = uint32_t(h & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
  return float_of(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
}

// Subnormal halves are rounded by an addition whose last bit is worth 2^-24.
static __device__ uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  const uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  const uint32_t large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = rest < 0x38800000u ? small : normal;
  return uint16_t(sign | (rest >= 0x477ff000u ? large : finite));
}

// x / y from r = 1 / y: one Newton step makes the product the rounded quotient (Markstein 1990).
// Where the step meets Inf or 0 it gives NaN, and the product is the quotient already.
template <class T> static __device__ T div_by(T x, T y, T r) {
  const T q = x * r, better = fma(fma(-q, y, x), r, q);
  return better == better ? better : q;
}
template <class T> static __device__ T sign_of(T x) { return T(T(0) < x) - T(x < T(0)); }
template <class T> static __device__ T max_nan(T a, T b) { return a > b || a != a ? a : b; }
template <class T> static __device__ T min_nan(T a, T b) { return a < b || a != a ? a : b; }
template <class T> static __device__ T floor_div(T a, T b) {
  return T(floor(double(a) / double(b)));
}
template <class T> static __device__ T floor_mod(T a, T b) { return a - b * floor_div(a, b); }

struct Table {
  void* const* pointers;  // (rows, COLUMNS)
  const double* numbers;  // (rows, NUMBERS)
  double* numbers_out;  // (rows, NUMBERS)
  double* inputs;  // (INPUTS)
  double* sums;  // (rows, SUMS)
  double* partials;  // (chunks, SUMS)
  unsigned* arrivals;  // (rows), zero between launches
  const int64_t* kinds;  // (rows): which case
  const int64_t* first_chunk;  // (rows + 1)
  const int64_t* chunk_row;  // (chunks)
  const int64_t* chunk_begin;  // (chunks), in elements
  const int64_t* chunk_end;  // (chunks), in elements
  const float* skip;  // nothing is done where it is not zero; may be null
  void* norm;  // where the norm over all rows goes; may be null
};

static constexpr int THREADS = 256;
static constexpr int RESIDENT = 4;
static constexpr int COLUMNS = 4;
static constexpr int NUMBERS = 1;
static constexpr int SUMS = 1;
static constexpr int UNIFORMS = 2;

// One value of any dtype that the first thread computes for its block.
union Slot { float f32; double f64; int64_t i64; uint16_t bits; bool truth; };

struct Shared {
  Slot uniform[UNIFORMS];
  double lane[THREADS];
  bool is_last;
};

template <int W> struct Width { static constexpr int value = W; };

// W elements in accesses of 16 bytes, or of all of them if they are fewer. A single one may lie
// anywhere.
template <int W, class T> static __device__ void load(T (&to)[W], const T* from) {
  constexpr int bytes = W * int(sizeof(T));
  if constexpr (W == 1) {
    to[0] = from[0];
  } else if constexpr (bytes % 16 == 0) {
    #pragma unroll
    for (int k = 0; k < bytes / 16; k++) {
      const uint4 piece = reinterpret_cast<const uint4*>(from)[k];
      memcpy(reinterpret_cast<char*>(to) + 16 * k, &piece, 16);
    }
  } else {
    const uint2 piece = *reinterpret_cast<const uint2*>(from);
    memcpy(to, &piece, 8);
  }
}

template <int W, class T> static __device__ void store(T* to, const T (&from)[W]) {
  constexpr int bytes = W * int(sizeof(T));
  if constexpr (W == 1) {
    to[0] = from[0];
  } else if constexpr (bytes % 16 == 0) {
    #pragma unroll
    for (int k = 0; k < bytes / 16; k++) {
      uint4 piece;
      memcpy(&piece, reinterpret_cast<const char*>(from) + 16 * k, 16);
      reinterpret_cast<uint4*>(to)[k] = piece;
    }
  } else {
    uint2 piece;
    memcpy(&piece, from, 8);
    *reinterpret_cast<uint2*>(to) = piece;
  }
}

template <int V, class T> static __device__ int access_bytes() {
  return V * sizeof(T) < 16 ? V * sizeof(T) : 16;
}

// How many elements lie before the first that an access may start at.
template <int V, class T> static __device__ int head_of(const T* p) {
  const int bytes = access_bytes<V, T>(), past = int(reinterpret_cast<uint64_t>(p) % bytes);
  return past % int(sizeof(T)) ? -1 : (bytes - past) % bytes / int(sizeof(T));
}

template <int V, class T> static __device__ bool is_aligned(const T* p, int head) {
  return head >= 0 && reinterpret_cast<uint64_t>(p + head) % access_bytes<V, T>() == 0;
}

// Elements [head, ...) V at a time; what is left at both ends one by one.
template <int V, class Element>
static __device__ void each_element(int head, int count, const Element& element) {
  const int body = head + (count - head) / V * V, rest = head + count - body;
  for (int i = int(threadIdx.x); i < rest; i += THREADS)
    element(Width<1>(), i < head ? i : i - head + body);
  for (int i = head + int(threadIdx.x) * V; i < body; i += THREADS * V) element(Width<V>(), i);
}

struct Sum { static __device__ double of(double a, double b) { return a + b; } };
struct Max { static __device__ double of(double a, double b) { return max_nan(b, a); } };

// The fold of one value of each thread, for all threads; always in the same order.
template <class Fold> static __device__ double fold_block(double value, Shared& s) {
  s.lane[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half)
      s.lane[threadIdx.x] = Fold::of(s.lane[threadIdx.x], s.lane[threadIdx.x + half]);
  }
  __syncthreads();
  const double folded = s.lane[0];
  __syncthreads();
  return folded;
}

// Partial sums come from other blocks: volatile, so that none is taken from a stale cache line.
template <class Fold>
static __device__ double fold_partials(const Table& t, int64_t first, int64_t end, int k,
                                       Shared& s) {
  double value = 0;
  for (int64_t c = first + threadIdx.x; c < end; c += THREADS)
    value = Fold::of(value, *(const volatile double*)(t.partials + c * SUMS + k));
  return fold_block<Fold>(value, s);
}

// Whether all other blocks of `blocks` have arrived. The last one leaves the counter at zero.
static __device__ bool arrives_last(unsigned* arrivals, int64_t blocks, Shared& s) {
  if (threadIdx.x == 0) {
    __threadfence();
    s.is_last = blocks == 1 || atomicAdd(arrivals, 1u) == unsigned(blocks - 1);
    if (s.is_last) *arrivals = 0;
    __threadfence();
  }
  __syncthreads();
  return s.is_last;
}

static __device__ void case_0_0(const Table& t, int64_t row, int64_t chunk, Shared& s) {
  void* const* ptr = t.pointers + row * COLUMNS;
  double* sum = t.sums + row * SUMS;
  const int64_t begin = t.chunk_begin[chunk];
  const int count = int(t.chunk_end[chunk] - begin);
  float* __restrict__ b0 = (float*)ptr[0] + begin;
  double r0 = 0;
  int head = head_of<4>(b0);
  if (!(is_aligned<4>(b0, head)) || head > count) head = count;
  const auto element = [&](auto width, int i) {
    constexpr int W = decltype(width)::value;
    alignas(16) float in0[W];
    load(in0, b0 + i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      const float x0 = in0[j];
      const double x1 = double(x0);
      const double x2 = (x1 * x1);
      r0 = Sum::of(r0, double(x2));
    }
  };
  each_element<4>(head, count, element);
  const double p0 = fold_block<Sum>(r0, s);
  if (threadIdx.x == 0) {
    t.partials[chunk * SUMS + 0] = p0;
  }
  const int64_t first = t.first_chunk[row], end = t.first_chunk[row + 1];
  if (!arrives_last(t.arrivals + row, end - first, s)) return;
  const double f0 = fold_partials<Sum>(t, first, end, 0, s);
  if (threadIdx.x == 0) {
    sum[0] = f0;
  }
}

static __device__ void case_0_1(const Table& t, int64_t row, int64_t chunk, Shared& s) {
  void* const* ptr = t.pointers + row * COLUMNS;
  const double* number = t.numbers + row * NUMBERS;
  const double* input = t.inputs;
  double* sum = t.sums + row * SUMS;
  if (threadIdx.x == 0) {
    const double u0 = (double)input[0];
    const float u1 = float(u0);
    const double u2 = (double)number[0];
    const double u3 = sum[0];
    const double u4 = (u2 * u3);
    const float u5 = float(u4);
    s.uniform[0].f32 = u1;
    s.uniform[1].f32 = u5;
  }
  __syncthreads();
  const float v0 = s.uniform[0].f32;
  const float v1 = s.uniform[1].f32;
  const int64_t begin = t.chunk_begin[chunk];
  const int count = int(t.chunk_end[chunk] - begin);
  uint16_t* __restrict__ b2 = (uint16_t*)ptr[2] + begin;
  uint16_t* __restrict__ b1 = (uint16_t*)ptr[1] + begin;
  float* __restrict__ b0 = (float*)ptr[0] + begin;
  int head = head_of<8>(b2);
  if (!(is_aligned<8>(b2, head) && is_aligned<8>(b1, head) && is_aligned<8>(b0, head)) || head > count) head = count;
  const auto element = [&](auto width, int i) {
    constexpr int W = decltype(width)::value;
    alignas(16) uint16_t in1[W];
    load(in1, b1 + i);
    alignas(16) float in0[W];
    load(in0, b0 + i);
    alignas(16) float out0[W];
    alignas(16) uint16_t out2[W];
    #pragma unroll
    for (int j = 0; j < W; j++) {
      const float x2 = in0[j];
      const uint16_t x3 = in1[j];
      const float x4 = bf16_to_f32(x3);
      const float x5 = (x4 * v0);
      const float x6 = (x5 * v1);
      const float x7 = (x2 - x6);
      const uint16_t x8 = f32_to_bf16(x7);
      out0[j] = x7;
      out2[j] = x8;
    }
    store(b0 + i, out0);
    store(b2 + i, out2);
  };
  each_element<8>(head, count, element);
  const int64_t first = t.first_chunk[row], end = t.first_chunk[row + 1];
  if (!arrives_last(t.arrivals + row, end - first, s)) return;
  if (threadIdx.x == 0) {
    const float x0 = *((float*)ptr[3]);
    const float x2 = (x0 + 0x1.0000000000000p+0f);
    *((float*)ptr[3]) = x2;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) phase_0(
    void* const* pointers, const double* numbers, double* numbers_out, double* inputs, double* sums, double* partials, unsigned* arrivals, const int64_t* kinds, const int64_t* first_chunk, const int64_t* chunk_row, const int64_t* chunk_begin, const int64_t* chunk_end, const float* skip, void* norm, int64_t first) {
  const Table t = {pointers, numbers, numbers_out, inputs, sums, partials, arrivals, kinds, first_chunk, chunk_row, chunk_begin, chunk_end, skip, norm};
  if (t.skip != nullptr && *t.skip != 0.0f) return;
  __shared__ Shared s;
  const int64_t chunk = first + blockIdx.x, row = t.chunk_row[chunk];
  switch (t.kinds[row]) {
    case 0: return case_0_0(t, row, chunk, s);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) phase_1(
    void* const* pointers, const double* numbers, double* numbers_out, double* inputs, double* sums, double* partials, unsigned* arrivals, const int64_t* kinds, const int64_t* first_chunk, const int64_t* chunk_row, const int64_t* chunk_begin, const int64_t* chunk_end, const float* skip, void* norm, int64_t first) {
  const Table t = {pointers, numbers, numbers_out, inputs, sums, partials, arrivals, kinds, first_chunk, chunk_row, chunk_begin, chunk_end, skip, norm};
  if (t.skip != nullptr && *t.skip != 0.0f) return;
  __shared__ Shared s;
  const int64_t chunk = first + blockIdx.x, row = t.chunk_row[chunk];
  switch (t.kinds[row]) {
    case 0: return case_0_1(t, row, chunk, s);
  }
}
