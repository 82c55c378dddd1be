/* The vector type of the machine, and the few operations that C cannot express portably.
 *
 * Everything else uses GCC's vector operators. The files are compiled with -ffp-contract=off, so that this file decides which
 * products and sums are fused. The optimiser must not decide it, because a row's result must not depend on the unrolled copy of
 * a loop that computed it. */
#ifndef GENBATCH_SIMD_H
#define GENBATCH_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define VL 16 /* floats in a vector */
#define MAX_ROWS 12 /* 12 rows x 2 vectors = 24 accumulators of 32 registers */
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#define MAX_ROWS 6 /* 6 rows x 2 vectors = 12 accumulators of 16 registers */
#elif defined(__aarch64__)
#define VL 4
#define MAX_ROWS 12
#else
#define VL 4
#define MAX_ROWS 6
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
/* The same types for memory of any alignment and any declared type. */
typedef float vf_memory __attribute__((vector_size(4 * VL), aligned(1), may_alias));
typedef int32_t vi_memory __attribute__((vector_size(4 * VL), aligned(1), may_alias));
typedef int8_t vb_memory __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * VL), aligned(1), may_alias));

ALWAYS_INLINE vf vf_load(const void *p) { return *(const vf_memory *)p; }
ALWAYS_INLINE void vf_store(void *p, vf x) { *(vf_memory *)p = x; }
ALWAYS_INLINE vi vi_load(const void *p) { return *(const vi_memory *)p; }
ALWAYS_INLINE vf vf_set1(float x) { return x - (vf){0}; }
ALWAYS_INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
ALWAYS_INLINE vf vf_from_int(vi x) { return __builtin_convertvector(x, vf); }

ALWAYS_INLINE vi vi_lanes(void)
{
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

ALWAYS_INLINE vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

/* Returns a * b + c, rounded once if the machine has such an instruction. */
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

ALWAYS_INLINE vf vf_max(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

ALWAYS_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Adds the lanes by halves, in the same order for every caller. */
ALWAYS_INLINE float vf_sum(vf x)
{
#if VL == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lane[VL];
    vf_store(lane, x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

ALWAYS_INLINE int32_t vi_sum(vi x)
{
#if VL == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
#endif
}

ALWAYS_INLINE float vf_largest(vf x)
{
#if VL == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[VL];
    vf_store(lane, x);
    for (int i = 1; i < VL; i++) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
#endif
}

ALWAYS_INLINE vi vi_max(vi a, vi b)
{
#if VL == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi above = a > b;
    return (above & a) | (~above & b);
#endif
}

ALWAYS_INLINE int32_t vi_largest(vi x)
{
#if VL == 16
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];
    for (int i = 1; i < VL; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

/* Returns exp(x) with a relative error below 2e-7; exactly 0 under -87, so that a masked score has no weight. */
ALWAYS_INLINE vf vf_exp(vf x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vi alive = x > -87.0f;
    vf y = vf_select(x < 88.0f, x, vf_set1(88.0f));
    y = vf_select(alive, y, vf_set1(-87.0f));
    vf t = vf_fma(y, vf_set1(1.44269504f), vf_set1(shift));
    vi n = (vi)t - (vi)vf_set1(shift);
    vf f = t - shift;
    vf r = vf_fma(f, vf_set1(-0.693359375f), y);
    r = vf_fma(f, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, r * r, r + 1.0f);
    return (vf)(((vi)p + (n << 23)) & alive);
}

/* Returns cap * tanh(x / cap) with an absolute error below 2e-7 of the cap. */
ALWAYS_INLINE vf vf_cap(vf x, float cap)
{
    vf capped = vf_fma(1.0f / (vf_exp(x * (2.0f / cap)) + 1.0f), vf_set1(-2.0f * cap), vf_set1(cap));
    return vf_select(x == x, capped, x); /* a NaN stays NaN */
}

/* Returns 2^x for x < 127 with a relative error below 5e-7; exactly 1 for 0; 2^-126 for x < -126 and for NaN. */
ALWAYS_INLINE vf vf_exp2(vf x)
{
    const float shift = 12582912.0f; /* as in vf_exp */
    vf y = vf_max(x, vf_set1(-126.0f));
    vf t = y + shift;
    vf f = y - (t - shift);
    vf p = vf_set1(1.3385654840e-3f);
    p = vf_fma(p, f, vf_set1(9.6610086984e-3f));
    p = vf_fma(p, f, vf_set1(5.5503674222e-2f));
    p = vf_fma(p, f, vf_set1(2.4022420804e-1f));
    p = vf_fma(p, f, vf_set1(6.9314718573e-1f));
    p = vf_fma(p, f, vf_set1(1.0f));
    return (vf)((vi)p + ((vi)t << 23));
}

/* Rounds to the nearest integer, ties to even; |x| < 2^22. */
ALWAYS_INLINE vi vi_round(vf x)
{
    const vf shift = vf_set1(12582912.0f);
    return (vi)(x + shift) - (vi)shift;
}

/* Rounds to the nearest integer; |x| <= 2^23. */
ALWAYS_INLINE vi vi_nearest(vf x)
{
#if VL == 16
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    return __builtin_convertvector(x + vf_select(x < 0.0f, vf_set1(-0.5f), vf_set1(0.5f)), vi);
#endif
}

/* Stores the low byte of each lane. */
ALWAYS_INLINE void vb_store(void *p, vi x)
{
#if VL == 16 /* gcc splits some of these conversions into lanes */
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    *(vb_memory *)p = __builtin_convertvector(x, vb);
#endif
}

/* bfloat16 pairs: lane i of the vector holds elements 2i (low half) and 2i + 1 (high half). */
ALWAYS_INLINE vf vf_low_bf16(vi pairs) { return (vf)(pairs << 16); }
ALWAYS_INLINE vf vf_high_bf16(vi pairs) { return (vf)(pairs & (int32_t)0xffff0000); }

ALWAYS_INLINE vf vf_from_bf16(const uint16_t *p)
{
    vi wide = __builtin_convertvector(*(const vh_memory *)p, vi);
    return (vf)(wide << 16);
}

ALWAYS_INLINE vf vf_from_f16(const uint16_t *p)
{
#if VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    /* Moves exponent and mantissa into place and scales by 2^112, which is also correct for subnormals. */
    vi wide = __builtin_convertvector(*(const vh_memory *)p, vi);
    vf magnitude = (vf)((wide & 0x7fff) << 13) * 5.192296858534828e33f;
    return (vf)((vi)magnitude | ((wide & 0x8000) << 16));
#endif
}

ALWAYS_INLINE uint16_t bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 64); /* a NaN stays NaN */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

ALWAYS_INLINE void bf16_store(uint16_t *p, vf x)
{
    vi bits = (vi)x;
    vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = (bits & 0x7fffffff) > 0x7f800000;
    vi out = (nan & ((bits >> 16) | 64)) | (~nan & rounded);
    *(vh_memory *)p = __builtin_convertvector(out, vh);
}

/* Adds w[4i..4i+3] . a[4i..4i+3] to each lane i; w has unsigned bytes and a signed bytes. The result is exact. */
ALWAYS_INLINE vi vi_dot_bytes(vi sum, vi w, vi a)
{
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)a);
#elif VL == 16
    __m512i we = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(0xff)), wo = _mm512_srli_epi16((__m512i)w, 8);
    __m512i ae = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)a, 8), 8), ao = _mm512_srai_epi16((__m512i)a, 8);
    return sum + (vi)_mm512_madd_epi16(we, ae) + (vi)_mm512_madd_epi16(wo, ao);
#elif VL == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)a);
#elif VL == 8
    __m256i we = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(0xff)), wo = _mm256_srli_epi16((__m256i)w, 8);
    __m256i ae = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)a, 8), 8), ao = _mm256_srai_epi16((__m256i)a, 8);
    return sum + (vi)_mm256_madd_epi16(we, ae) + (vi)_mm256_madd_epi16(wo, ao);
#elif defined(__x86_64__)
    __m128i we = _mm_and_si128((__m128i)w, _mm_set1_epi16(0xff)), wo = _mm_srli_epi16((__m128i)w, 8);
    __m128i ae = _mm_srai_epi16(_mm_slli_epi16((__m128i)a, 8), 8), ao = _mm_srai_epi16((__m128i)a, 8);
    return sum + (vi)_mm_madd_epi16(we, ae) + (vi)_mm_madd_epi16(wo, ao);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)a);
#elif defined(__ARM_FEATURE_DOTPROD)
    /* Both sides are signed here: w = (w - 128) + 127 + 1. */
    int8x16_t quad = (int8x16_t)a;
    int32x4_t s = vdotq_s32((int32x4_t)sum, veorq_s8((int8x16_t)w, vdupq_n_s8(-128)), quad);
    return (vi)vdotq_s32(vdotq_s32(s, vdupq_n_s8(127), quad), vdupq_n_s8(1), quad);
#else
    UNROLL for (int byte = 0; byte < 4; byte++)
        sum += ((w >> (8 * byte)) & 0xff) * ((a << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}

#endif
