"""Conversions and small functions that both C-family targets have, in the words of each."""

from __future__ import annotations

_TEXT = """\
FUNCTION float bf16_to_f32(uint16_t h) { return float_of(uint32_t(h) << 16); }

FUNCTION uint16_t f32_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0u) : uint16_t(rounded);
}

// The exponent is moved by a multiplication, which also normalises subnormal halves.
FUNCTION float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = uint32_t(h & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
  return float_of(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
}

// Subnormal halves are rounded by an addition whose last bit is worth 2^-24.
FUNCTION uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  const uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  const uint32_t large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = rest < 0x38800000u ? small : normal;
  return uint16_t(sign | (rest >= 0x477ff000u ? large : finite));
}

// x / y from r = 1 / y: one Newton step makes the product the rounded quotient (Markstein 1990).
// Where the step meets Inf or 0 it gives NaN, and the product is the quotient already.
template <class T> FUNCTION T div_by(T x, T y, T r) {
  const T q = x * r, better = MATH::fma(MATH::fma(-q, y, x), r, q);
  return better == better ? better : q;
}
template <class T> FUNCTION T sign_of(T x) { return T(T(0) < x) - T(x < T(0)); }
template <class T> FUNCTION T max_nan(T a, T b) { return a > b || a != a ? a : b; }
template <class T> FUNCTION T min_nan(T a, T b) { return a < b || a != a ? a : b; }
template <class T> FUNCTION T floor_div(T a, T b) {
  return T(MATH::floor(double(a) / double(b)));
}
template <class T> FUNCTION T floor_mod(T a, T b) { return a - b * floor_div(a, b); }
"""


def spell_conversions(function: str, math: str) -> str:
    """Return the text for one target.

    Args:
        function: what stands before a function of the target, ``static inline`` say.
        math: what stands before the name of a function of its mathematics library, ``std::`` say.
    """
    return _TEXT.replace("FUNCTION", function).replace("MATH::", math)
