// The walks of delta_backward.h over blocks of chunks: what the memory was at the start of each, and the way back.
#pragma once
#include "delta_backward.h"

namespace {

// What a memory is at some time: pieces of memory, one after another.
struct Snapshot {
    char *bytes = nullptr;

    struct Measure {
        int64_t total = 0;
        void operator()(const void *, int64_t n) { total += n; }
    };
    struct Save {
        char *to;
        void operator()(const void *at, int64_t n) { memcpy(to, at, n), to += n; }
    };
    struct Restore {
        const char *from;
        void operator()(void *at, int64_t n) { memcpy(at, from, n), from += n; }
    };
    template <class Memory, class Visit> static void walk(Memory &memory, DeltaBack &chunk, Visit &visit) {
        visit(&chunk.made, sizeof chunk.made);
        memory.remember(chunk, visit);
    }
    template <class Memory> void take(Memory &memory, DeltaBack &chunk, Arena &arena) {
        Measure measure;
        walk(memory, chunk, measure);
        bytes = (char *)arena.bytes(measure.total);
        if (!bytes) return;
        Save save{bytes};
        walk(memory, chunk, save);
    }
    template <class Memory> void put_back(Memory &memory, DeltaBack &chunk) const {
        Restore restore{bytes};
        walk(memory, chunk, restore);
    }
};

// One head, by blocks of chunks.
template <class Memory> struct DeltaWalk {
    Arena arena;
    const AttendArgs &args;
    const Cut cut;
    const int64_t number;  // of the sequence's first chunk
    DeltaBack chunk;
    Memory memory;
    const float *shared;
    float *own;

    DeltaWalk(const BackwardArgs &back, int64_t n, int64_t h, int64_t part, const float *given)
        : args(*back.attend), cut(args, n), number(chunks_before(args, n)), chunk(back, n, h, part, arena),
          memory(args, n, h, chunk, arena), shared(given), own(given ? nullptr : arena.floats(Shared::floats(args))) {}

    void begin(int64_t c) {
        const int64_t at = cut.begin(c), m = cut.end(c) - at, floats = Shared::floats(args);
        float *from = own ? own : (float *)shared + ((number + c) * args.key_heads + chunk.key_head) * floats;
        Shared here = Shared::at(from, args);
        if (own) here.fill(args, cut.offset + at, m, chunk.key_head);
        chunk.begin(cut.offset, at, m, here);
    }

    bool run() {
        const int64_t chunks = cut.chunks();
        if (!chunks) return true;
        const int64_t each = block_of(chunks), blocks = (chunks + each - 1) / each;
        Snapshot *starts = (Snapshot *)arena.bytes(blocks * sizeof(Snapshot));
        chunk.learns = false;
        for (int64_t c = 0; c < chunks && !arena.failed; ++c) {
            if (c % each == 0) (new (Here{starts + c / each}) Snapshot)->take(memory, chunk, arena);
            if (c / each == blocks - 1 || arena.failed) break;
            begin(c);
            memory.chunk(chunk, cut.begin(c));
        }
        chunk.learns = true;
        for (int64_t b = blocks; b-- > 0 && !arena.failed;) {
            starts[b].put_back(memory, chunk);
            back_over(b * each, (b + 1) * each < chunks ? (b + 1) * each : chunks);
        }
        if (!arena.failed) chunk.finish(cut.length);
        return !arena.failed;
    }
    static int64_t block_of(int64_t chunks) {  // so that there are about as many blocks as chunks in one
        int64_t each = 1;
        while (each * each < chunks) ++each;
        return each;
    }

    void back_over(int64_t from, int64_t to) {
        chunk.new_tape();
        for (int64_t c = from; c < to && !arena.failed; ++c) {
            begin(c);
            memory.chunk(chunk, cut.begin(c));
            chunk.end_chunk();
        }
        for (int64_t c = to; c-- > from && !arena.failed;) {
            begin(c);
            chunk.back_over(c - from);
        }
    }
};

template <class Memory>
bool delta_walk_back(const BackwardArgs &back, int64_t n, int64_t h, int64_t heads, int64_t part, const float *shared) {
    for (int64_t i = h; i < h + heads; ++i) {
        DeltaWalk<Memory> walk(back, n, i, part, shared);
        if (walk.arena.failed || !walk.run()) return false;
    }
    return true;
}

bool delta_backward(const BackwardArgs &args, int64_t n, int64_t h, int64_t heads, int64_t part, const float *shared) {
    switch (args.attend->memory) {
        case Memory::single: return delta_walk_back<SingleHead<DeltaBack>>(args, n, h, heads, part, shared);
        case Memory::log_linear: return delta_walk_back<LevelHead<DeltaBack>>(args, n, h, heads, part, shared);
        case Memory::dynamic: return delta_walk_back<SpanHead<DeltaBack>>(args, n, h, heads, part, shared);
    }
    return false;
}

}  // namespace
