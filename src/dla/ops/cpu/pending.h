// Transitions of the delta rule that the states of a head have not been through yet.
//
// All states of a head go through the same A_u = I - beta_u k_u k_u^T, so a step need not touch them: a query is
// carried back through the A_u instead, newest first, and meets the states as they were. What a token wrote is met where
// the query is at its step. Sixteen of them are then applied at once, A_16 ... A_1 = I - sum_u k_u r_u^T.
#pragma once
#include "args.h"
#include "rows.h"

namespace {

struct Pending {
    const int64_t dk;
    float *keys = nullptr, *beta = nullptr;    // [PENDING][dk], [PENDING]
    float *turned = nullptr, *back = nullptr;  // [PENDING][dk] r_u; [dk] scratch
    int32_t *count;                            // null: transitions have no beta

    Pending(const DecodeArgs &a, int64_t at) : dk(a.dk), count(a.pending ? a.pending + at : nullptr) {
        if (!count) return;
        keys = a.pending_keys + at * PENDING * dk, beta = a.pending_beta + at * PENDING;
        turned = a.pending_scratch + at * (PENDING + 1) * dk, back = turned + PENDING * dk;
    }
    int64_t many() const { return count ? *count : 0; }
    bool full() const { return many() == PENDING; }

    void push(const float *k, float b) {
        memcpy(keys + *count * dk, k, dk * 4);
        beta[(*count)++] = b;
    }

    // x as the states before all of them meet it; fits[u] is its product with k_u when it comes to what step u wrote.
    const float *carry_back(const float *x, float *fits) const {
        if (!many()) return x;
        memcpy(back, x, dk * 4);
        for (int64_t u = many() - 1; u >= 0; --u) {
            fits[u] = dot(back, keys + u * dk, dk);
            add_row(back, -beta[u] * fits[u], keys + u * dk, dk);
        }
        return back;
    }

    // What the steps from u on make of the key of a row.
    template <class T> void apply_to_row(T *key, int64_t u) const {
        if (u >= many()) return;
        memset(back, 0, dk * 4);
        add_row(back, 1, key, dk);
        for (; u < many(); ++u) add_row(back, -beta[u] * dot(back, keys + u * dk, dk), keys + u * dk, dk);
        put_row(key, back, dk);
    }

    // r_u = beta_u (k_u - sum_{w < u} (k_u . k_w) r_w), zero behind the last
    void turn() const {
        memset(turned, 0, PENDING * dk * 4);
        for (int64_t u = 0; u < many(); ++u) {
            float *r = turned + u * dk;
            const float *k = keys + u * dk;
            add_row(r, beta[u], k, dk);
            for (int64_t w = 0; w < u; ++w) add_row(r, -beta[u] * dot(k, keys + w * dk, dk), turned + w * dk, dk);
        }
    }

    // M [dk][dv] <- (I - sum_u k_u r_u^T) M, after `turn`
    template <class T> void apply(T *M, int64_t dv) const {
        int64_t j = 0;
        for (; j + 2 * LANES <= dv; j += 2 * LANES) apply_to_columns<2>(M + j, dv);
        for (; j + LANES <= dv; j += LANES) apply_to_columns<1>(M + j, dv);
        for (; j < dv; ++j) {
            float along[PENDING];
            for (int64_t u = 0; u < many(); ++u) {
                along[u] = 0;
                for (int64_t d = 0; d < dk; ++d) along[u] += turned[u * dk + d] * number(M[d * dv + j]);
            }
            for (int64_t d = 0; d < dk; ++d) {
                float x = number(M[d * dv + j]);
                for (int64_t u = 0; u < many(); ++u) x -= keys[u * dk + d] * along[u];
                put(M + d * dv + j, x);
            }
        }
    }

    // V vectors of columns
    template <int V, class T> void apply_to_columns(T *M, int64_t dv) const {
        constexpr int SOME = 8;  // of them at a time
        static_assert(PENDING % SOME == 0, "turned is zero up to PENDING");
        Vec along[PENDING][V];
        for (int64_t first = 0; first < many(); first += SOME) {
            Vec total[SOME][V] = {};
            for (int64_t d = 0; d < dk; ++d)
#pragma GCC unroll 8
                for (int u = 0; u < SOME; ++u)
#pragma GCC unroll 2
                    for (int c = 0; c < V; ++c)
                        total[u][c] += load_as(M + d * dv + c * LANES) * turned[(first + u) * dk + d];
#pragma GCC unroll 8
            for (int u = 0; u < SOME; ++u)
#pragma GCC unroll 2
                for (int c = 0; c < V; ++c) along[first + u][c] = total[u][c];
        }
        for (int64_t d = 0; d < dk; ++d) {
            Vec x[V];
#pragma GCC unroll 2
            for (int c = 0; c < V; ++c) x[c] = load_as(M + d * dv + c * LANES);
            for (int64_t u = 0; u < many(); ++u)
#pragma GCC unroll 2
                for (int c = 0; c < V; ++c) x[c] -= along[u][c] * keys[u * dk + d];
#pragma GCC unroll 2
            for (int c = 0; c < V; ++c) store_as(M + d * dv + c * LANES, x[c]);
        }
    }
};

}  // namespace
