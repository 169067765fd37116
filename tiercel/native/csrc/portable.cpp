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
    static Int zero() { return {}; }
    static Float zero_float() { return {}; }
    static Int load(const void *p) {
        Int out;
        std::memcpy(&out, p, sizeof out);
        return out;
    }
    template <class F>
    static Int each_bits(F f) {
        Int out;
        for (int i = 0; i < N; i++) out.lane[i] = static_cast<int32_t>(f(i));
        return out;
    }
    static int byte(int32_t bits, int i) { return static_cast<int8_t>(static_cast<uint32_t>(bits) >> (8 * i)); }
    static Int even_bytes(Int x) { return each_bits([&](int i) { return (byte(x.lane[i], 0) & 0xFFFF) | static_cast<uint32_t>(byte(x.lane[i], 2)) << 16; }); }
    static Int odd_bytes(Int x) { return each_bits([&](int i) { return (byte(x.lane[i], 1) & 0xFFFF) | static_cast<uint32_t>(byte(x.lane[i], 3)) << 16; }); }
    static Int low_nibbles(Int x) { return each_bits([&](int i) { return x.lane[i] & 0x0F0F0F0F; }); }
    static Int high_nibbles(Int x) { return each_bits([&](int i) { return static_cast<uint32_t>(x.lane[i]) >> 4 & 0x0F0F0F0Fu; }); }
    template <int SHIFT>
    static Int nibble(Int words) {
        for (int i = 0; i < N; i++) words.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(words.lane[i]) >> SHIFT & 0x000F000Fu);
        return words;
    }
    static Int all_bits(const void *p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return each_bits([&](int) { return bits; });
    }
    static Int dot16(Int sum, Int w, Int x) {
        for (int i = 0; i < N; i++)
            sum.lane[i] += static_cast<int16_t>(w.lane[i]) * static_cast<int16_t>(x.lane[i]) + (w.lane[i] >> 16) * (x.lane[i] >> 16);
        return sum;
    }
    static Int dot8(Int sum, Int w, Int x) {
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 4; j++) sum.lane[i] += byte(w.lane[i], j) * byte(x.lane[i], j);
        return sum;
    }
    static constexpr bool BIASED = false;
    static Int dot8_signed(Int sum, Int w, Int x) { return dot8(sum, w, x); }
    static Int bias(const int16_t *) { return zero(); }
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
    static Float sums(const Float *x) {
        return each([&](int i) {
            float total = 0;
            for (const float lane : x[i].lane) total += lane;
            return total;
        });
    }
    static void store(float *p, Float x) { std::memcpy(p, x.lane, sizeof x.lane); }
    static void store_half(uint16_t *p, Float x) {
        for (int i = 0; i < N; i++) p[i] = float_to_half(x.lane[i]);
    }
};
}  // namespace

#define CODE_PATH portable_path
#define CODE_PATH_NAME "portable"
#include "kernels.inc"
