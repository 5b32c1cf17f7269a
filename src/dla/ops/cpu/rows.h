// Rows of numbers as they lie in a state, float32 or bfloat16, of any length: the decoding step's few operations.
#pragma once
#include "simd.h"

namespace {

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(LANES * 4)));

INLINE Vec load_as(const float *x) { return load(x); }
INLINE Vec load_as(const uint16_t *x) { return (Vec)(__builtin_convertvector(*(const Shorts *)x, Unsigned) << 16); }
INLINE float number(float x) { return x; }
INLINE float number(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE void put(float *to, float x) { *to = x; }
INLINE void put(uint16_t *to, float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void store_as(float *to, Vec x) { store(to, x); }
INLINE void store_as(uint16_t *to, Vec x) {
    for (int i = 0; i < LANES; ++i) put(to + i, x[i]);
}

// sum of a[i] b[i]
template <class T> float dot(const float *a, const T *b, int64_t n) {
    Vec total{};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(a + i) * load_as(b + i);
    float rest = sum(total);
    for (; i < n; ++i) rest += a[i] * number(b[i]);
    return rest;
}

// y += s x
template <class T> void add_row(float *y, float s, const T *x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, load(y + i) + load_as(x + i) * s);
    for (; i < n; ++i) y[i] += s * number(x[i]);
}

// y += s q^T M, M [dk][dv]
template <class T> void read_matrix(float *y, float s, const float *q, const T *M, int64_t dk, int64_t dv) {
    int64_t j = 0;
    for (; j + 4 * LANES <= dv; j += 4 * LANES) {
        Vec even[4] = {}, odd[4] = {};
        int64_t d = 0;
        for (; d + 2 <= dk; d += 2) {
            const T *row = M + d * dv + j;
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                even[c] += load_as(row + c * LANES) * q[d];
                odd[c] += load_as(row + dv + c * LANES) * q[d + 1];
            }
        }
        for (; d < dk; ++d)
            for (int c = 0; c < 4; ++c) even[c] += load_as(M + d * dv + j + c * LANES) * q[d];
        for (int c = 0; c < 4; ++c) store(y + j + c * LANES, load(y + j + c * LANES) + (even[c] + odd[c]) * s);
    }
    for (; j + LANES <= dv; j += LANES) {
        Vec total{};
        for (int64_t d = 0; d < dk; ++d) total += load_as(M + d * dv + j) * q[d];
        store(y + j, load(y + j) + total * s);
    }
    for (; j < dv; ++j) {
        float total = 0;
        for (int64_t d = 0; d < dk; ++d) total += q[d] * number(M[d * dv + j]);
        y[j] += s * total;
    }
}

// A = a A + b B
template <class T> void add_matrices(T *A, float a, const T *B, float b, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_as(A + i, load_as(A + i) * a + load_as(B + i) * b);
    for (; i < n; ++i) put(A + i, a * number(A[i]) + b * number(B[i]));
}

}  // namespace
