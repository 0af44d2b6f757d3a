"""CUDA text that is the same in every kernel: the table, conversions, loops, sums of a block.

No header is needed. A block takes one chunk of one tensor. Blocks never wait for each other: where
something is done once for a tensor, the block that arrives last does it, when all others have read
what it is about to overwrite.
"""

from __future__ import annotations

from mpcompile.codegen.conversions import spell_conversions

THREADS = 256
"""Threads of a block."""

MANY_UNIFORMS = 10
"""More values than this that are the same for all of a tensor need more registers."""


def resident_blocks(reads_f64: bool, uniforms: int) -> int:
    """Return how many blocks a multiprocessor has to hold at once, so that nothing spills.

    That leaves 64 registers a thread, or 80 with many uniform values, or 128 for f64.
    """
    if reads_f64:
        return 2
    return 3 if uniforms > MANY_UNIFORMS else 4


FIELDS = (
    ("void* const*", "pointers", "(rows, COLUMNS)"),
    ("const double*", "numbers", "(rows, NUMBERS)"),
    ("double*", "numbers_out", "(rows, NUMBERS)"),
    ("double*", "inputs", "(INPUTS)"),
    ("double*", "sums", "(rows, SUMS)"),
    ("double*", "partials", "(chunks, SUMS)"),
    ("unsigned*", "arrivals", "(rows), zero between launches"),
    ("const int64_t*", "kinds", "(rows): which case"),
    ("const int64_t*", "first_chunk", "(rows + 1)"),
    ("const int64_t*", "chunk_row", "(chunks)"),
    ("const int64_t*", "chunk_begin", "(chunks), in elements"),
    ("const int64_t*", "chunk_end", "(chunks), in elements"),
    ("const float*", "skip", "nothing is done where it is not zero; may be null"),
    ("void*", "norm", "where the norm over all rows goes; may be null"),
)
"""The table: type, name and shape of each array, in the order in which a kernel takes them."""

PRELUDE = """\
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;

static __device__ uint32_t bits_of(float x) { return __float_as_uint(x); }
static __device__ float float_of(uint32_t u) { return __uint_as_float(u); }
static __device__ double double_of(int64_t u) { return __longlong_as_double(u); }

""" + spell_conversions("static __device__", "")

BLOCK = """\
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
"""
