// Products of the sizes that small layers have: thousands of rows, up to some hundreds of columns and depth.
#pragma once
#include <stdlib.h>

#include "layer_args.h"
#include "simd.h"

namespace {

constexpr int64_t WIDTH = PANEL * LANES;  // columns of a panel
constexpr int64_t DEEP = 128;             // depth of a panel, which then stays in the nearest cache
constexpr int64_t TALL = ROWS * 8;        // rows of what is added up beside c

// Columns first ... first + wide of b, from depth d on, side by side and with zeros up to whole vectors.
INLINE void pack(const MatmulArgs &a, int64_t d, int64_t deep, int64_t first, int64_t wide, float *panel) {
    const int64_t full = padded(wide);
    if (a.b_step == 1) {
        for (int64_t i = 0; i < deep; ++i, panel += full) {
            memcpy(panel, a.b + (d + i) * a.b_row + first, wide * 4);
            for (int64_t c = wide; c < full; ++c) panel[c] = 0;
        }
        return;
    }
    for (int64_t c = 0; c < full; ++c) {
        const float *from = a.b + d * a.b_row + (first + c) * a.b_step;
        for (int64_t i = 0; i < deep; ++i) panel[i * full + c] = c < wide ? from[i * a.b_row] : 0;
    }
}

// Rows of c by one panel; columns past c's last go to `beside` on their way.
INLINE void by_panel(const MatmulArgs &a, int64_t row, int64_t rows, int64_t d, int64_t deep, int64_t first, int64_t wide,
                     const float *b, int64_t ldb, bool add, float *beside) {
    const float *x = a.a + row * a.a_row + d * a.a_step;
    float *c = a.c + row * a.c_row + first;
    if (wide % LANES == 0) {
        if (add) product<Into::fade>(rows, wide, deep, x, a.a_row, a.a_step, b, ldb, c, a.c_row, nullptr, 1.0f);
        else product<Into::set>(rows, wide, deep, x, a.a_row, a.a_step, b, ldb, c, a.c_row);
        return;
    }
    const int64_t full = padded(wide);
    for (int64_t r = 0; r < rows; r += TALL) {
        const int64_t tall = rows - r < TALL ? rows - r : TALL;
        product<Into::set>(tall, full, deep, x + r * a.a_row, a.a_row, a.a_step, b, ldb, beside, full);
        for (int64_t i = 0; i < tall; ++i)
            for (int64_t j = 0; j < wide; ++j) {
                float &to = c[(r + i) * a.c_row + j];
                to = add ? to + beside[i * full + j] : beside[i * full + j];
            }
    }
}

// A number of c is added up in the same order whatever rows it is computed with.
bool matmul(const MatmulArgs &a, int64_t first, int64_t last) {
    float *panel = (float *)aligned_alloc(64, (DEEP + TALL) * WIDTH * 4);
    if (!panel) return false;
    float *beside = panel + DEEP * WIDTH;
    for (int64_t d = 0; d < a.depth || d == 0; d += DEEP) {
        const int64_t deep = a.depth - d < DEEP ? a.depth - d : DEEP;
        for (int64_t column = 0; column < a.columns; column += WIDTH) {
            const int64_t wide = a.columns - column < WIDTH ? a.columns - column : WIDTH;
            const bool lies_well = a.b_step == 1 && wide % LANES == 0 && a.b_row == wide;
            if (!lies_well) pack(a, d, deep, column, wide, panel);
            const float *b = lies_well ? a.b + d * a.b_row : panel;
            by_panel(a, first, last - first, d, deep, column, wide, b, padded(wide), a.add || d > 0, beside);
        }
    }
    free(panel);
    return true;
}

}  // namespace
