// The second stage for one head: outputs, and the state after them, of the memories with one state and with levels.
#pragma once
#include "chunk.h"

namespace {

constexpr int64_t TURN = 8;  // chunks that a head computes before the next one has its turn

// One head: its scratch and its memory, which has chunk(chunk, position of its first token in the call) and finish().
template <class C, class Memory> struct Worker {
    Arena arena;
    C chunk;
    Memory memory;
    float *own;  // what it would share with other heads, if that is not given

    Worker(const AttendArgs &a, int64_t n, int64_t h, bool alone)
        : chunk(a, h, arena), memory(a, n, h, chunk, arena), own(alone ? arena.floats(Shared::floats(a)) : nullptr) {}

    void turn(const AttendArgs &args, const Cut &cut, int64_t number, int64_t from, int64_t to, const float *shared) {
        for (int64_t c = from; c < to && !arena.failed; ++c) {
            const int64_t begin = cut.begin(c), m = cut.end(c) - begin, floats = Shared::floats(args);
            float *at = own ? own : (float *)shared + ((number + c) * args.key_heads + chunk.key_head) * floats;
            Shared here = Shared::at(at, args);
            if (own) here.fill(args, cut.offset + begin, m, chunk.key_head);
            chunk.begin(cut.offset, begin, m, here);
            memory.chunk(chunk, begin);
            if (!arena.failed) chunk.write_outputs();
        }
    }
};

// Heads h ... h + heads of sequence n.
template <class C, template <class> class Memory>
bool walk(const AttendArgs &args, int64_t n, int64_t h, int64_t heads, const float *shared) {
    typedef Worker<C, Memory<C>> One;
    Arena arena;
    One *workers = (One *)arena.bytes(heads * sizeof(One));
    if (!workers) return false;
    const Cut cut(args, n);
    const int64_t number = chunks_before(args, n), chunks = cut.chunks();
    bool fine = true;
    for (int64_t i = 0; i < heads; ++i) {
        new (Here{workers + i}) One(args, n, h + i, !shared);
        fine = fine && !workers[i].arena.failed;
    }
    for (int64_t c = 0; c < chunks && fine; c += TURN)
        for (int64_t i = 0; i < heads; ++i) {
            workers[i].turn(args, cut, number, c, c + TURN < chunks ? c + TURN : chunks, shared);
            fine = fine && !workers[i].arena.failed;
        }
    for (int64_t i = 0; i < heads; ++i) {
        if (fine) workers[i].memory.finish(workers[i].chunk);
        workers[i].~One();
    }
    return fine;
}

template <class C> struct SingleHead {
    float *matrix;
    bool fresh;
    float *final;

    SingleHead(const AttendArgs &a, int64_t n, int64_t h, C &chunk, Arena &arena) {
        const int64_t at = (n * a.heads + h) * a.dk * a.dv;
        matrix = chunk.new_matrix(arena);
        fresh = !a.initial;
        final = a.final ? a.final + at : nullptr;
        if (!fresh && !arena.failed) chunk.load_matrix(matrix, a.initial + at);
    }
    void chunk(C &c, int64_t) {
        c.own(nullptr);
        if constexpr (C::moves) {
            c.read_and_take(matrix, fresh);
        } else {
            if (!fresh) c.read(matrix, c.E, 1, 0);
            c.spread();
            c.fold(matrix, c.E[c.m - 1], fresh, c.m, c.own_rows(0));
        }
        fresh = false;
    }
    void finish(C &c) {
        if (final && !fresh) c.save_matrix(matrix, final);
    }
    // All that a chunk changes, piece by piece: visit(where it is, bytes).
    template <class Visit> void remember(C &c, Visit &visit) {
        visit(&fresh, sizeof fresh);
        if (!fresh) visit(matrix, c.dk * c.dvp * 4);
    }
};

INLINE int64_t bit_length(int64_t x) { return x ? 64 - __builtin_clzll(uint64_t(x)) : 0; }

// Fenwick levels. A block of tokens is a matrix and the position of its first token: seen from t, its level is the bit
// length of that position xor t, whichever of its tokens one takes.
template <class C> struct LevelHead {
    struct Block {
        float *matrix;
        float factor;
        int64_t start, size;
    };
    const AttendArgs &args;
    Block blocks[128];  // oldest, and largest, first
    int64_t count = 0, position;
    float *spare[128] = {};
    int64_t spares = 0;
    float *weight;  // [CHUNK][CHUNK] of own tokens
    float *lam;     // [width][CHUNK]
    float *final;
    Arena &arena;

    LevelHead(const AttendArgs &a, int64_t n, int64_t h, C &chunk, Arena &pieces) : args(a), arena(pieces) {
        position = a.position ? a.position[n] : 0;
        weight = arena.floats(CHUNK * CHUNK), lam = arena.floats(a.width * CHUNK);
        const int64_t size = a.dk * a.dv;
        final = a.final ? a.final + (n * a.heads + h) * a.states * size : nullptr;
        int64_t start = 0;
        for (int64_t level = a.carried; level-- > 0;)
            if (position >> level & 1) {
                float *matrix = take(chunk);
                if (!matrix) return;
                chunk.load_matrix(matrix, a.initial + ((n * a.heads + h) * a.carried + level) * size);
                blocks[count++] = {matrix, 1, start, int64_t(1) << level};
                start += int64_t(1) << level;
            }
    }
    float *take(C &c) { return spares ? spare[--spares] : c.new_matrix(arena); }
    // lam's column for a block or token that begins at `start`, seen from position t.
    int64_t column(int64_t start, int64_t t) const {
        const int64_t level = bit_length(t ^ start);
        return level < args.width ? level : args.width - 1;
    }

    void chunk(C &c, int64_t) {
        for (int64_t t = 0; t < c.m; ++t)
            for (int64_t i = 0; i < args.width; ++i)
                lam[i * CHUNK + t] = args.lam[((c.first + t) * args.heads + c.h) * args.width + i];
        for (int64_t s = 0; s < c.m; ++s)
            for (int64_t t = s; t < c.m; ++t)
                weight[s * CHUNK + t] = lam[column(position + s, position + t) * CHUNK + t];
        c.own(weight);
        float by_time[CHUNK];
        for (int64_t b = 0; b < count; ++b) {
            for (int64_t t = 0; t < c.m; ++t)
                by_time[t] = lam[column(blocks[b].start, position + t) * CHUNK + t] * c.E[t];
            c.read(blocks[b].matrix, by_time, blocks[b].factor, b);
        }
        if constexpr (C::backward)
            if (c.learns) learn(c);
        c.spread();
        for (int64_t b = 0; b < count; ++b) blocks[b].factor *= c.E[c.m - 1];
        close(c, position + c.m);
        position += c.m;
    }

    // Gradients of lam.
    void learn(C &c) {
        for (int64_t t = 0; t < c.m; ++t) {
            float *d = c.d_lam(t);
            for (int64_t s = 0; s <= t; ++s) d[column(position + s, position + t)] += c.d_own[s * CHUNK + t];
            for (int64_t b = 0; b < count; ++b)
                d[column(blocks[b].start, position + t)] += c.d_weight[b * CHUNK + t] * c.E[t];
        }
    }

    // Blocks and tokens up to `end` as its bits say: one block for each that is set, tokens folded where they belong.
    void close(C &c, int64_t end) {
        Block old[128];
        const int64_t olds = count;
        memcpy(old, blocks, olds * sizeof(Block));
        count = 0;
        int64_t b = 0, start = 0;
        for (int64_t level = 62; level >= 0; --level) {
            if (!(end >> level & 1)) continue;
            const int64_t stop = start + (int64_t(1) << level);
            float *matrix = nullptr;
            float factor = 1;
            for (; b < olds && old[b].start < stop; ++b) {
                if (!matrix) {
                    matrix = old[b].matrix, factor = old[b].factor;
                    continue;
                }
                c.combine(matrix, factor, old[b].matrix, old[b].factor);
                factor = 1;
                spare[spares++] = old[b].matrix;
            }
            const int64_t from = start > position ? start : position;
            if (stop > from) {
                const bool fresh = !matrix;
                if (fresh) matrix = take(c);
                if (!matrix) return;
                c.fold(matrix, factor, fresh, stop - from, c.own_rows(from - position));
                factor = 1;
            }
            blocks[count++] = {matrix, factor, start, stop - start};
            start = stop;
        }
    }

    void finish(C &c) {
        if (!final) return;
        for (int64_t b = 0; b < count; ++b)
            c.save_matrix(blocks[b].matrix, final + (bit_length(blocks[b].size) - 1) * c.dk * c.dv, blocks[b].factor);
    }
    template <class Visit> void remember(C &c, Visit &visit) {
        visit(&count, sizeof count), visit(&spares, sizeof spares), visit(&position, sizeof position);
        visit(blocks, count * sizeof(Block)), visit(spare, spares * sizeof(float *));
        for (int64_t b = 0; b < count; ++b) visit(blocks[b].matrix, c.dk * c.dvp * 4);
    }
};

}  // namespace
