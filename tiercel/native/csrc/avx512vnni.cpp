// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma -mf16c.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {
struct V {
    using Int = __m512i;
    using Float = __m512;
    static constexpr int N = 16, ROWS = 8;
    static Int zero() { return _mm512_setzero_si512(); }
    static Float zero_float() { return _mm512_setzero_ps(); }
    static Int load(const void *p) { return _mm512_loadu_si512(p); }
    template <int SHIFT>
    static Int nibble(Int words) {
        if constexpr (SHIFT == 12) return _mm512_srli_epi16(words, 12);
        return _mm512_and_si512(_mm512_srli_epi16(words, SHIFT), _mm512_set1_epi16(15));
    }
    static Int even_bytes(Int x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
    static Int odd_bytes(Int x) { return _mm512_srai_epi16(x, 8); }
    static Int low_nibbles(Int x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static Int high_nibbles(Int x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
    static Int all_bits(const void *p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return _mm512_set1_epi32(bits);
    }
    static Int dot16(Int sum, Int w, Int x) { return _mm512_dpwssd_epi32(sum, w, x); }
    static Int dot8(Int sum, Int w, Int x) { return _mm512_dpbusd_epi32(sum, w, x); }
    // The instruction multiplies unsigned by signed bytes: x comes with 128 added, and the sum starts at -128 times the weights'.
    static constexpr bool BIASED = true;
    static Int dot8_signed(Int sum, Int w, Int x) { return _mm512_dpbusd_epi32(sum, x, w); }
    static Int bias(const int16_t *p) {
        return _mm512_slli_epi32(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 7);
    }
    static Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
    static Float half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    static Float brain(const uint16_t *p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static Float load_float(const float *p) { return _mm512_loadu_ps(p); }
    static Float all(float x) { return _mm512_set1_ps(x); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    // Lane i: the sum of x[i]. Neighbours meet in pairs, fours, then across the quarters of the vectors.
    static Float sums(const Float *x) {
        Float fours[4];
        for (int i = 0; i < 4; i++) {
            const Float a = pairs(x[4 * i], x[4 * i + 1]), b = pairs(x[4 * i + 2], x[4 * i + 3]);
            const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
            const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
            fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        }
        const Float first = quarters<0x88>(fours[0], fours[1]), second = quarters<0x88>(fours[2], fours[3]);
        const Float third = quarters<0xDD>(fours[0], fours[1]), fourth = quarters<0xDD>(fours[2], fours[3]);
        const Float left = _mm512_add_ps(first, third), right = _mm512_add_ps(second, fourth);
        return _mm512_add_ps(quarters<0x88>(left, right), quarters<0xDD>(left, right));
    }
    static Float pairs(Float a, Float b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
    template <int WHICH>
    static Float quarters(Float a, Float b) { return _mm512_shuffle_f32x4(a, b, WHICH); }
    static void store(float *p, Float x) { _mm512_storeu_ps(p, x); }
    static void store_half(uint16_t *p, Float x) {  // min and max give their second operand where one is NaN
        const Float kept = _mm512_max_ps(all(-65504.0f), _mm512_min_ps(all(65504.0f), x));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};
}  // namespace

#define CODE_PATH avx512vnni_path
#define CODE_PATH_NAME "avx512vnni"
#include "kernels.inc"
