// `make sanitize`: the compiled kernels, called with valid and with hostile arguments, under AddressSanitizer with
// UndefinedBehaviorSanitizer, under ThreadSanitizer, and as they are shipped. usage: drive [seed]
#include "drive.h"

int main(int count, char **given) {
    const uint64_t seed = count > 1 ? std::strtoull(given[1], nullptr, 10) : 0;
    for (const Test &test : Test::all()) {
        std::printf("%s ... ", test.name.c_str());
        std::fflush(stdout);
        Draw draw(seed);
        test.run(draw);
        std::printf("fine\n");
    }
    std::printf("%zu tests, seed %llu\n", Test::all().size(), (unsigned long long)seed);
}
