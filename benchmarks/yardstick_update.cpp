// What a person writes for AdamW with clipping and a bf16 copy: the yardstick of bench_update.py.
// Same skip predicate, rounding, flags and chunks as the generated kernels; one table made once.
#include <cmath>
#include <cstdint>
#include <cstring>

struct Tensor {
  float *param, *mean, *square;
  const float* grad;
  uint16_t* copy;
  int64_t size;
};
struct Piece {
  int64_t tensor, begin, end;
};
struct Settings {
  double rate, beta1, beta2, eps, decay, step;
};

static inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return x == x ? uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16) : uint16_t(0x7fc0u);
}

extern "C" double sum_of_squares(const Tensor* tensors, const Piece* pieces, int64_t count, int threads) {
  double total = 0;
  #pragma omp parallel for schedule(dynamic, 2) reduction(+ : total) num_threads(threads)
  for (int64_t k = 0; k < count; k++) {
    const float* grad = tensors[pieces[k].tensor].grad;
    double lanes[32] = {0}, sum = 0;
    int64_t i = pieces[k].begin;
    for (; i + 32 <= pieces[k].end; i += 32) {
      #pragma omp simd
      for (int64_t j = 0; j < 32; j++) lanes[j] += double(grad[i + j]) * double(grad[i + j]);
    }
    for (; i < pieces[k].end; i++) sum += double(grad[i]) * double(grad[i]);
    for (double lane : lanes) sum += lane;
    total += sum;
  }
  return total;
}

extern "C" void adamw(const Tensor* tensors, const Piece* pieces, int64_t count, int threads,
                      const Settings* s, float factor, const float* skip) {
  if (*skip != 0) return;
  const float keep = float(1 - s->rate * s->decay), toward = float(1 - s->beta1);
  const float beta2 = float(s->beta2), rest = float(1 - s->beta2), eps = float(s->eps);
  const float rate = float(s->rate / (1 - std::pow(s->beta1, s->step)));
  const float root = float(1 / std::sqrt(1 - std::pow(s->beta2, s->step)));
  #pragma omp parallel for schedule(dynamic, 2) num_threads(threads)
  for (int64_t k = 0; k < count; k++) {
    const Tensor& t = tensors[pieces[k].tensor];
    float *__restrict param = t.param, *__restrict mean = t.mean, *__restrict square = t.square;
    const float* __restrict grad = t.grad;
    uint16_t* __restrict copy = t.copy;
    #pragma omp simd
    for (int64_t i = pieces[k].begin; i < pieces[k].end; i++) {
      const float g = grad[i] * factor;
      const float m = mean[i] + toward * (g - mean[i]);
      const float v = square[i] * beta2 + rest * g * g;
      const float p = param[i] * keep - rate * m / (std::sqrt(v) * root + eps);
      mean[i] = m, square[i] = v, param[i] = p, copy[i] = to_bf16(p);
    }
  }
}
