// Plain C++: for processors without a path of their own; the compiler vectorises what it can.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "model.hpp"

namespace {
struct V {
    static constexpr int N = 16, ROWS = 4;
    struct Int {
        int32_t lane[N];  // 16-bit pairs where they hold weights or activations
    };
    struct Float {
        float lane[N];
    };
    template <class F>
    static Float each(F f) {
        Float out;
        for (int i = 0; i < N; i++) out.lane[i] = f(i);
        return out;
    }
    static int32_t pack(int16_t low, int16_t high) {
        return static_cast<int32_t>(static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
    }
    static Int zero() { return {}; }
    static Float zero_float() { return {}; }
    static Int load(const void *p) {
        Int out;
        std::memcpy(&out, p, sizeof out);
        return out;
    }
    static Int widen(const int8_t *p) {
        Int out;
        for (int i = 0; i < N; i++) out.lane[i] = pack(p[2 * i], p[2 * i + 1]);
        return out;
    }
    template <int SHIFT>
    static Int nibble(Int words) {
        for (int i = 0; i < N; i++) words.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(words.lane[i]) >> SHIFT & 0x000F000Fu);
        return words;
    }
    static Int pair(const int16_t *p) {
        Int out;
        for (int i = 0; i < N; i++) out.lane[i] = pack(p[0], p[1]);
        return out;
    }
    static Int dot(Int sum, Int w, Int x) {
        for (int i = 0; i < N; i++)
            sum.lane[i] += static_cast<int16_t>(w.lane[i]) * static_cast<int16_t>(x.lane[i]) + (w.lane[i] >> 16) * (x.lane[i] >> 16);
        return sum;
    }
    static Float to_float(Int x) { return each([&](int i) { return static_cast<float>(x.lane[i]); }); }
    static Float half(const uint16_t *p) { return each([&](int i) { return half_to_float(p[i]); }); }
    static Float brain(const uint16_t *p) {
        return each([&](int i) {
            const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
            float x;
            std::memcpy(&x, &bits, sizeof x);
            return x;
        });
    }
    static Float load_float(const float *p) { return each([&](int i) { return p[i]; }); }
    static Float all(float x) { return each([&](int) { return x; }); }
    static Float mul(Float a, Float b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
    static Float fma(Float a, Float b, Float c) { return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
    static float sum(Float x) {
        float total = 0;
        for (int i = 0; i < N; i++) total += x.lane[i];
        return total;
    }
    static void store(float *p, Float x) { std::memcpy(p, x.lane, sizeof x.lane); }
};
}  // namespace

#define CODE_PATH portable_path
#define CODE_PATH_NAME "portable"
#include "kernels.inc"
