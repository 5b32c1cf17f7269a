// Sigmoid and softplus of vectors, and vectors that end before their last lane.
#pragma once
#if DLA_LEVEL > 0
#include <immintrin.h>
#endif

#include "simd.h"

namespace {

#if DLA_LEVEL == 256
constexpr int32_t FIRST[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};  // from LANES - n on: a mask of n lanes
#endif

// The first n numbers, zeros behind them.
INLINE Vec load_some(const float *x, int64_t n) {
    if (n >= LANES) return load(x);
#if DLA_LEVEL == 512
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
#elif DLA_LEVEL == 256
    return (Vec)_mm256_maskload_ps(x, _mm256_loadu_si256((const __m256i *)(FIRST + LANES - n)));
#else
    Vec y{};
    for (int64_t i = 0; i < n; ++i) y[i] = x[i];
    return y;
#endif
}

INLINE void store_some(float *x, Vec y, int64_t n) {
    if (n >= LANES) return store(x, y);
#if DLA_LEVEL == 512
    _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), (__m512)y);
#elif DLA_LEVEL == 256
    _mm256_maskstore_ps(x, _mm256_loadu_si256((const __m256i *)(FIRST + LANES - n)), (__m256)y);
#else
    for (int64_t i = 0; i < n; ++i) x[i] = y[i];
#endif
}

INLINE Vec choose(Ints which, Vec yes, Vec no) { return (Vec)(((Ints)yes & which) | ((Ints)no & ~which)); }

// exp(-|x|), from which both follow without overflow.
INLINE Vec exp_minus_abs(Vec x) { return exp_vec((Vec)((Bits)x | 0x80000000u)); }

INLINE Vec sigmoid_from(Vec x, Vec e) {
    const Vec r = 1.0f / (1.0f + e);
    return choose(x >= 0.0f, r, e * r);
}

INLINE Vec sigmoid(Vec x) { return sigmoid_from(x, exp_minus_abs(x)); }

// max(x, 0) + log(1 + e), e = exp(-|x|): the logarithm as 2 atanh(e / (2 + e)), which keeps its digits where e is small.
INLINE Vec softplus_from(Vec x, Vec e) {
    const Vec s = e / (2.0f + e), q = s * s;
    Vec p = all(1.0f / 15);
    p = p * q + 1.0f / 13;
    p = p * q + 1.0f / 11;
    p = p * q + 1.0f / 9;
    p = p * q + 1.0f / 7;
    p = p * q + 1.0f / 5;
    p = p * q + 1.0f / 3;
    p = p * q * s + s;
    return choose(x > 0.0f, x, Vec{}) + (p + p);
}

}  // namespace
