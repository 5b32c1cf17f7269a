// All kernels of one instruction set, as a table. Included by the files level_*.cpp, which choose it.
#include "attend.h"
#include "backward.h"
#include "decide.h"
#include "decide_delta.h"
#include "decode.h"
#include "delta.h"
#include "delta_walk.h"
#include "spans.h"

namespace {

int64_t shared_floats(const AttendArgs &args) { return Shared::floats(args); }

bool attend_share(const AttendArgs &args, int64_t chunk, int64_t key_head, float *shared) {
    int64_t begin, m;
    const Cut cut = find_chunk(args, chunk, begin, m);
    Shared::at(shared, args).fill(args, cut.offset + begin, m, key_head);
    return true;
}

template <class C> bool attend_by(const AttendArgs &args, int64_t n, int64_t h, int64_t heads, const float *shared) {
    switch (args.memory) {
        case Memory::single: return walk<C, SingleHead>(args, n, h, heads, shared);
        case Memory::log_linear: return walk<C, LevelHead>(args, n, h, heads, shared);
        case Memory::dynamic: return walk<C, SpanHead>(args, n, h, heads, shared);
    }
    return false;
}

bool attend(const AttendArgs &args, int64_t n, int64_t h, int64_t heads, const float *shared) {
    return (args.beta ? attend_by<DeltaChunk> : attend_by<Chunk>)(args, n, h, heads, shared);
}

bool backward(const BackwardArgs &args, int64_t n, int64_t h, int64_t heads, int64_t part, const float *shared) {
    if (args.attend->beta) return delta_backward(args, n, h, heads, part, shared);
    switch (args.attend->memory) {
        case Memory::single: return walk_back<SingleHead<BackChunk>>(args, n, h, heads, part, shared);
        case Memory::log_linear: return walk_back<LevelHead<BackChunk>>(args, n, h, heads, part, shared);
        case Memory::dynamic: return walk_back<SpanHead<BackChunk>>(args, n, h, heads, part, shared);
    }
    return false;
}

int64_t decide_floats(const DecideArgs &args) { return SharedKeys::floats(args.dk); }

bool decide_share(const DecideArgs &args, int64_t chunk, int64_t key_head, float *shared) {
    int64_t begin, m;
    const Cut cut = find_chunk(args, chunk, begin, m);
    const float *k = args.k + (cut.offset + begin) * args.k_stride + key_head * args.dk;
    return SharedKeys::at(shared, args.dk).fill(k, args.k_stride, m, args.dk);
}

template <class Head>
bool decide_by(const DecideArgs &args, int64_t n, int64_t h, int64_t heads, const float *shared) {
    Arena arena;
    Head *made = (Head *)arena.bytes(heads * sizeof(Head));
    const int64_t floats = decide_floats(args), number = chunks_before(args, n);
    const int64_t position = args.carried ? args.position0[n] : 0;
    float *own = shared ? nullptr : arena.floats(floats);
    for (int64_t i = 0; i < heads && !arena.failed; ++i) new (Here{made + i}) Head(args, n, h + i, arena);
    if (arena.failed) return false;
    const Cut cut(args, n);
    for (int64_t c = 0; c < cut.chunks(); ++c) {
        const int64_t begin = cut.begin(c), m = cut.end(c) - begin, key_head = made->key_head;
        if (own && !decide_share(args, number + c, key_head, own)) return false;
        float *at = own ? own : (float *)shared + ((number + c) * args.key_heads + key_head) * floats;
        for (int64_t i = 0; i < heads; ++i) made[i].chunk(cut.offset + begin, m, position + begin, SharedKeys::at(at, args.dk));
    }
    return true;
}

bool decide(const DecideArgs &args, int64_t n, int64_t h, int64_t heads, const float *shared) {
    if (args.beta) return decide_by<DeltaHead>(args, n, h, heads, shared);
    return decide_by<PlainHead>(args, n, h, heads, shared);
}

bool decode(const DecodeArgs &args, int64_t n, int64_t h) {
    switch (args.memory) {
        case Memory::single: decode_single(args, n, h); return true;
        case Memory::log_linear: decode_levels(args, n, h); return true;
        case Memory::dynamic:
            return args.stored == 4 ? DecodeHead<float>(args, n, h).step() : DecodeHead<uint16_t>(args, n, h).step();
    }
    return false;
}

void decode_fold(const DecodeArgs &args, int64_t n, int64_t h, int32_t fresh) {
    if (args.stored == 4) DecodeHead<float>(args, n, h).fold(fresh);
    else DecodeHead<uint16_t>(args, n, h).fold(fresh);
}

double decode_norm(const DecodeArgs &args, int64_t n, int64_t h) {
    return args.stored == 4 ? DecodeHead<float>(args, n, h).measured() : DecodeHead<uint16_t>(args, n, h).measured();
}

void decode_settle(const DecodeArgs &args, int64_t n, int64_t h) {
    if (args.stored == 4) DecodeHead<float>(args, n, h).settle();
    else DecodeHead<uint16_t>(args, n, h).settle();
}

}  // namespace

extern const Level DLA_TABLE;
const Level DLA_TABLE = {shared_floats, attend_share, attend, backward,    decide_floats, decide_share,
                         decide,        decode,       decode_fold, decode_norm, decode_settle};
