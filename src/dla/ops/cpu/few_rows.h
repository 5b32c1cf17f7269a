// Linear maps of a few rows: every number of the weight is read once, where it lies.
#pragma once
#include "activations.h"
#include "layer_args.h"

namespace {

// A tile of `rows` x `outs` numbers. A number is added up in the same order whatever tile it is in.
template <int rows, int outs> INLINE void linear_tile(const LinearArgs &a, int64_t row, int64_t out) {
    const float *x = a.x + row * a.x_row, *w = a.weight + out * a.in;
    Vec made[rows][outs];
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o) made[r][o] = Vec{};
    for (int64_t c = 0; c < a.in; c += LANES) {
        Vec given[rows];
        for (int r = 0; r < rows; ++r) given[r] = load_some(x + r * a.x_row + c, a.in - c);
        for (int o = 0; o < outs; ++o) {
            const Vec weight = load_some(w + o * a.in + c, a.in - c);
            for (int r = 0; r < rows; ++r) made[r][o] += given[r] * weight;
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o) {
            float y = sum(made[r][o]);
            if (a.bias) y += a.bias[out + o];
            if (a.plus) y += a.plus[(row + r) * a.plus_row + out + o];
            a.y[(row + r) * a.out + out + o] = y;
        }
}

template <int outs> INLINE void linear_rows(const LinearArgs &a, int64_t out) {
    int64_t row = 0;
    if (outs <= 4)  // there are registers for so many
        for (; row + 4 <= a.rows; row += 4) linear_tile<4, outs <= 4 ? outs : 1>(a, row, out);
    for (; row < a.rows; ++row) linear_tile<1, outs>(a, row, out);
}

void linear(const LinearArgs &a, int64_t first, int64_t last) {
    if (a.rows < 4)
        for (; first + 8 <= last; first += 8) linear_rows<8>(a, first);
    for (; first + 4 <= last; first += 4) linear_rows<4>(a, first);
    for (; first < last; ++first) linear_rows<1>(a, first);
}

}  // namespace
