"""C++ text that is the same in every kernel: the table, conversions, the loop over chunks."""

from __future__ import annotations

from mpcompile.codegen.conversions import spell_conversions

PRELUDE = """\
#include <cmath>
#include <cstdint>
#include <cstring>

struct Table {
  void* const* pointers;        // (rows, COLUMNS)
  const double* numbers;        // (rows, NUMBERS)
  double* numbers_out;          // (rows, NUMBERS)
  const double* shared;         // (groups, SHARED)
  const double* inputs;         // (INPUTS)
  double* sums;                 // (rows, SUMS)
  double* partials;             // (chunks, SUMS)
  const int64_t* kinds;         // (rows): which case
  const int64_t* groups;        // (rows)
  const int64_t* first_chunk;   // (rows + 1)
  const int64_t* chunk_row;     // (chunks)
  const int64_t* chunk_begin;   // (chunks), in elements
  const int64_t* chunk_end;     // (chunks), in elements
  double* terms;                // (rows, TOTALS)
  double* totals;               // (TOTALS)
};

static inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

""" + spell_conversions("static inline", "std::")

PARTIALS = """\
template <class T> static inline void ask_ahead(const T* block) {
  for (int64_t j = 0; j < LANES; j += 64 / sizeof(T)) __builtin_prefetch(block + 1024 + j);
}

static double add_partials(const Table& t, int64_t row, int64_t k) {
  double a = 0;
  for (int64_t c = t.first_chunk[row]; c < t.first_chunk[row + 1]; c++)
    a += t.partials[c * SUMS + k];
  return a;
}

static double max_partials(const Table& t, int64_t row, int64_t k) {
  double a = 0;
  for (int64_t c = t.first_chunk[row]; c < t.first_chunk[row + 1]; c++)
    a = max_nan(t.partials[c * SUMS + k], a);
  return a;
}

static double add_terms(const Table& t, int64_t begin, int64_t end, int64_t k) {
  double a = 0;
  for (int64_t row = begin; row < end; row++) a += t.terms[row * TOTALS + k];
  return a;
}

static double max_terms(const Table& t, int64_t begin, int64_t end, int64_t k) {
  double a = -__builtin_inf();
  for (int64_t row = begin; row < end; row++) a = max_nan(t.terms[row * TOTALS + k], a);
  return a;
}
"""

RUN = """\
// One chunk after another; what a tensor needs once is done by whoever ran its only chunk, or at
// the end, where little is left. One barrier a phase.
extern "C" int64_t run(const Table* table, int64_t phase, int64_t phase_end, int64_t row_begin,
                       int64_t row_end, int64_t threads) {
  const Table& t = *table;
  const int64_t chunk_begin = t.first_chunk[row_begin], chunk_end = t.first_chunk[row_end];
  for (; phase < phase_end; phase++) {
    #pragma omp parallel for schedule(dynamic, 2) num_threads(int(threads))
    for (int64_t c = chunk_begin; c < chunk_end; c++) {
      const int64_t row = t.chunk_row[c];
      elements(t, phase, row, t.chunk_begin[c], t.chunk_end[c], t.partials + c * SUMS);
      if (t.first_chunk[row + 1] - t.first_chunk[row] == 1) finish(t, phase, row);
    }
    for (int64_t row = row_begin; row < row_end; row++)
      if (t.first_chunk[row + 1] - t.first_chunk[row] != 1) finish(t, phase, row);
    fold_totals(t, phase, row_begin, row_end);
  }
  return 0;
}
"""
