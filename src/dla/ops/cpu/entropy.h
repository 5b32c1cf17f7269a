// The loss of every row of logits and, in their place, its gradient: softmax minus one at the target.
#pragma once
#include "activations.h"
#include "layer_args.h"

namespace {

INLINE float largest(const float *x, int64_t size) {
    Vec most = all(-INFINITY);
    int64_t c = 0;
    for (; c + LANES <= size; c += LANES) {
        const Vec next = load(x + c);
        most = choose(next > most, next, most);
    }
    float found = -INFINITY;
    for (int i = 0; i < LANES; ++i) found = most[i] > found ? most[i] : found;
    for (; c < size; ++c) found = x[c] > found ? x[c] : found;
    return found;
}

void entropy(const EntropyArgs &a, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        float *x = a.logits + row * a.classes;
        const float most = largest(x, a.classes), own = x[a.target[row]];
        Vec sums{};
        for (int64_t c = 0; c < a.classes; c += LANES) {
            const int64_t n = a.classes - c;
            Vec e = exp_vec(load_some(x + c, n) - most);
            for (int64_t i = n; i < LANES; ++i) e[i] = 0;
            sums += e;
            store_some(x + c, e, n);
        }
        const float total = sum(sums), share = 1.0f / total;
        for (int64_t c = 0; c < a.classes; c += LANES)
            store_some(x + c, load_some(x + c, a.classes - c) * share, a.classes - c);
        x[a.target[row]] -= 1.0f;
        a.loss[row] = logf(total) + (most - own);
    }
}

}  // namespace
