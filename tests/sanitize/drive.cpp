// `make sanitize`: the compiled kernels, called with valid and with hostile arguments, under AddressSanitizer with
// UndefinedBehaviorSanitizer, under ThreadSanitizer, and as they are shipped, at every instruction set of this machine.
// usage: drive [seed]
#include "drive.h"

extern "C" const char *dla_use_level(const char *);

int main(int count, char **given) {
    const uint64_t seed = count > 1 ? std::strtoull(given[1], nullptr, 10) : 0;
    int ran = 0;
    for (const std::string level : {"portable", "avx2", "avx512"}) {
        if (level != dla_use_level(level.c_str())) {
            std::printf("%s: not on this machine\n", level.c_str());
            continue;
        }
        for (const Test &test : Test::all()) {
            const bool any = test.name.rfind("scan:", 0) == 0;  // the scan is the same at every level
            if (any && level != "portable") continue;
            std::printf("%s%s%s ... ", any ? "" : level.c_str(), any ? "" : ", ", test.name.c_str());
            std::fflush(stdout);
            Draw draw(seed);
            test.run(draw);
            std::printf("fine\n"), ++ran;
        }
    }
    std::printf("%d tests, seed %llu\n", ran, (unsigned long long)seed);
}
