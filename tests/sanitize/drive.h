// What the drivers of the kernels share. A driver is a file beside this one that registers its tests:
//     static const Test hostile("scan: hostile sizes", [](Draw &draw) { ... expect(...); });
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

// Random numbers by a seed.
struct Draw {
    std::mt19937_64 source;
    explicit Draw(uint64_t seed) : source(seed) {}
    int64_t whole(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(source); }
    bool chance(double p) { return std::bernoulli_distribution(p)(source); }
    double share() { return std::uniform_real_distribution<double>()(source); }
    double normal() { return std::normal_distribution<double>()(source); }
    template <class T> const T &of(const std::vector<T> &choices) { return choices[whole(0, choices.size() - 1)]; }
};

struct Test {
    std::string name;
    std::function<void(Draw &)> run;
    static std::vector<Test> &all() {
        static std::vector<Test> tests;
        return tests;
    }
    Test(std::string name, std::function<void(Draw &)> run) : name(name), run(run) { all().push_back(*this); }
};

// End with a message unless something holds.
#define expect(holds, ...)                                       \
    do {                                                         \
        if (!(holds)) {                                          \
            std::fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
            std::fprintf(stderr, __VA_ARGS__);                   \
            std::fprintf(stderr, "\n");                          \
            std::abort();                                        \
        }                                                        \
    } while (false)
