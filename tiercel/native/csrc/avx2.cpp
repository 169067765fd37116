// Compiled with -mavx2 -mfma -mf16c.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {
struct V {
    using Int = __m256i;
    using Float = __m256;
    static constexpr int N = 8, ROWS = 4;
    static Int zero() { return _mm256_setzero_si256(); }
    static Float zero_float() { return _mm256_setzero_ps(); }
    static Int load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    template <int SHIFT>
    static Int nibble(Int words) {
        if constexpr (SHIFT == 12) return _mm256_srli_epi16(words, 12);
        return _mm256_and_si256(_mm256_srli_epi16(words, SHIFT), _mm256_set1_epi16(15));
    }
    static Int even_bytes(Int x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
    static Int odd_bytes(Int x) { return _mm256_srai_epi16(x, 8); }
    static Int low_nibbles(Int x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static Int high_nibbles(Int x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
    static Int all_bits(const void *p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return _mm256_set1_epi32(bits);
    }
    static Int dot16(Int sum, Int w, Int x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
    // Pairs of products meet in 16 bits: at most 2 * 15 * 127 here and 2 * 128 * 127 below, so nothing saturates.
    static Int dot8(Int sum, Int w, Int x) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
    }
    static constexpr bool BIASED = false;
    static Int dot8_signed(Int sum, Int w, Int x) { return dot8(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
    static Int bias(const int16_t *) { return zero(); }
    static Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
    static Float half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
    static Float brain(const uint16_t *p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static Float load_float(const float *p) { return _mm256_loadu_ps(p); }
    static Float all(float x) { return _mm256_set1_ps(x); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    // Lane i: the sum of x[i].
    static Float sums(const Float *x) {
        const Float low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        const Float high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
        return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
    }
    static void store(float *p, Float x) { _mm256_storeu_ps(p, x); }
    static void store_half(uint16_t *p, Float x) {  // min and max give their second operand where one is NaN
        const Float kept = _mm256_max_ps(all(-65504.0f), _mm256_min_ps(all(65504.0f), x));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};
}  // namespace

#define CODE_PATH avx2_path
#define CODE_PATH_NAME "avx2"
#include "kernels.inc"
