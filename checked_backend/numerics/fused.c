/* Everything that `measure` wants to know about two dense tensors, in one loop over both; and a checksum of one. See
   fused.py.

   Bit patterns of numbers of one sign are in the order of the numbers, so greatest floats are found as integers, where
   NaN is the greatest. Ratios and distances are taken only in rows where one may exceed the greatest so far. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { ROW = 512 };  /* elements summed in float before they go into a double; they stay in the first-level cache */
enum { AHEAD = 3 };  /* rows fetched before they are needed: a processor by itself stops at each page, in two streams */
enum { VAIN = 8 };   /* one row in so many may be looked at twice in vain */

struct statistics { /* in and out, as in fused.py */
    double squares, reference_squares, peak, top, ratio;
    int64_t differing, peak_row, ratio_row, ulp, overflows;
};

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t magnitude(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffff;
}

static inline int keep_greater(double *greatest, float value) {
    if (!(value > *greatest) && value == value) return 0;
    *greatest = value; /* NaN stays */
    return 1;
}

static inline float from_float32(int32_t bits) { return as_float((uint32_t)bits); }

static inline float from_bfloat16(int16_t bits) { return as_float((uint32_t)bits << 16); }

/* Numbers below 2^-14 have no leading bit: added to 1/2, whose last place is theirs, and 1/2 is taken away again. */
static inline float from_float16(int16_t bits) {
    const uint32_t size = (uint32_t)bits & 0x7fff, sign = ((uint32_t)bits & 0x8000) << 16;
    const float small = as_float(0x3f000000 + size) - 0.5f;
    const uint32_t large = (size << 13) + (size < 0x7c00 ? 0x38000000 : 0x70000000);
    uint32_t value;
    memcpy(&value, &small, sizeof value);
    return as_float(sign | (size < 0x400 ? value : large));
}

struct thresholds {
    float above, far, either; /* ratios: greater than the known one; of a greater distance; the lesser of both */
    int32_t wide;             /* bits of a difference that a greater distance has */
};

/* What exceeds the greatest ratio and the greatest distance that are known.

   A greater distance than `ulp` has a ratio of at least (ulp + 1) * 2^-precision, if that is below 1/2: see measure.py.
   Numbers are nowhere denser than at 0, so no two that differ by `gap` are farther apart than -gap / 2 and gap / 2. So a
   greater gap is more than twice the number of place ulp / 2, less a little for its own rounding: `middle`. Rounding
   keeps the order, so none is overlooked. */
static struct thresholds least_that_count(double ratio, int64_t ulp, float middle, double precision) {
    const double least = (double)(ulp + 1) * precision;
    struct thresholds found;
    found.above = nextafterf((float)ratio, INFINITY);
    found.far = least < 0.5 ? (float)least : 0.5f;
    found.either = found.above < found.far ? found.above : found.far;
    found.wide = magnitude(2 * middle);
    return found;
}

#define MIDDLE(WIDEN, BITS) (total->ulp / 2 > 3 ? WIDEN((BITS)(total->ulp / 2 - 3)) : 0)

#define DEFINE_LOOP(NAME, BITS, WIDEN, MASK, PRECISION)                                                                \
    static void NAME##_of_equal(const BITS *values, int length, struct statistics *total) {                            \
        int32_t top = 0;                                                                                               \
        float squares = 0;                                                                                             \
        _Pragma("omp simd reduction(max: top) reduction(+: squares)")                                                  \
        for (int i = 0; i < length; i++) {                                                                             \
            const float a = WIDEN(values[i]);                                                                          \
            const int32_t size_bits = magnitude(a);                                                                    \
            top = size_bits > top ? size_bits : top;                                                                   \
            squares += a * a;                                                                                          \
        }                                                                                                              \
        total->reference_squares += squares;                                                                           \
        keep_greater(&total->top, as_float(top));                                                                      \
    }                                                                                                                  \
    static inline int NAME##_row(const BITS *one, const BITS *other, int length, float above, float far,               \
                                 int32_t wide, const int distances, struct statistics *total, int64_t start) {         \
        int32_t peak = 0, top = 0, differing = 0, beyond = 0;                                                          \
        float squares = 0, reference_squares = 0;                                                                      \
        _Pragma("omp simd reduction(max: peak, top) reduction(+: differing, beyond, squares, reference_squares)")      \
        for (int i = 0; i < length; i++) {                                                                             \
            const float a = WIDEN(one[i]), gap = WIDEN(other[i]) - a;                                                  \
            const int32_t gap_bits = magnitude(gap), size_bits = magnitude(a);                                         \
            const float size = as_float(size_bits), distance = as_float(gap_bits);                                     \
            peak = gap_bits > peak ? gap_bits : peak;                                                                  \
            top = size_bits > top ? size_bits : top;                                                                   \
            differing += gap_bits != 0;                                                                                \
            const int apart = distances ? (distance >= size * far) & (gap_bits > wide) : 0;                            \
            beyond += (gap_bits != 0) & (apart | (distance >= size * above));                                          \
            squares += gap * gap;                                                                                      \
            reference_squares += a * a;                                                                                \
        }                                                                                                              \
        total->differing += differing;                                                                                 \
        total->squares += squares;                                                                                     \
        total->reference_squares += reference_squares;                                                                 \
        keep_greater(&total->top, as_float(top));                                                                      \
        if (keep_greater(&total->peak, as_float(peak))) total->peak_row = start;                                       \
        return beyond;                                                                                                 \
    }                                                                                                                  \
    void NAME(const BITS *reference, const BITS *candidate, int64_t count, struct statistics *total) {                 \
        struct thresholds least = least_that_count(total->ratio, total->ulp, MIDDLE(WIDEN, BITS), PRECISION);          \
        int in_vain = 0;                                                                                               \
        for (int64_t start = 0; start < count; start += ROW) {                                                         \
            const BITS *one = reference + start, *other = candidate + start;                                           \
            const int length = count - start < ROW ? (int)(count - start) : ROW;                                       \
            for (int i = 0; i < ROW && start + (AHEAD + 1) * ROW <= count; i += 64 / (int)sizeof(BITS)) {              \
                __builtin_prefetch(one + AHEAD * ROW + i);                                                             \
                __builtin_prefetch(other + AHEAD * ROW + i);                                                           \
            }                                                                                                          \
            if (memcmp(one, other, (size_t)length * sizeof(BITS)) == 0) {                                              \
                NAME##_of_equal(one, length, total);                                                                   \
                continue;                                                                                              \
            }                                                                                                          \
            /* one threshold makes a shorter loop, and does while few rows exceed it in vain */                        \
            const int beyond = in_vain && least.far == 0.5f                                                            \
                ? NAME##_row(one, other, length, least.above, least.far, least.wide, 1, total, start)                  \
                : NAME##_row(one, other, length, least.either, 0, 0, 0, total, start);                                 \
            if (in_vain) in_vain--;                                                                                    \
            if (!beyond) continue;                                                                                     \
            uint32_t ulp = 0;                                                                                          \
            int32_t ratio = 0, overflows = 0;                                                                          \
            _Pragma("omp simd reduction(max: ulp, ratio) reduction(|: overflows)")                                     \
            for (int i = 0; i < length; i++) {                                                                         \
                const float a = WIDEN(one[i]), gap = WIDEN(other[i]) - a;                                              \
                const uint32_t p = one[i] & MASK, q = other[i] & MASK;                                                 \
                const uint32_t distance = (one[i] ^ other[i]) < 0 ? p + q : p > q ? p - q : q - p;                     \
                ulp = distance > ulp ? distance : ulp;                                                                 \
                const int32_t quotient = magnitude(gap / a); /* 0 / 0 does not count */                                \
                const int32_t counted = magnitude(gap) ? quotient : 0;                                                 \
                /* infinite though the reference is not 0: a ratio that float32 does not hold */                       \
                overflows |= (counted == 0x7f800000) & (magnitude(a) != 0);                                            \
                ratio = counted > ratio ? counted : ratio;                                                             \
            }                                                                                                          \
            total->overflows += overflows;                                                                             \
            if (ulp <= total->ulp && as_float(ratio) <= total->ratio) {                                                \
                in_vain += VAIN;                                                                                       \
                continue;                                                                                              \
            }                                                                                                          \
            if (ulp > total->ulp) total->ulp = ulp;                                                                    \
            if (as_float(ratio) > total->ratio) {                                                                      \
                total->ratio = as_float(ratio);                                                                        \
                total->ratio_row = start;                                                                              \
            }                                                                                                          \
            least = least_that_count(total->ratio, total->ulp, MIDDLE(WIDEN, BITS), PRECISION);                        \
        }                                                                                                              \
    }

DEFINE_LOOP(fused_float32, int32_t, from_float32, 0x7fffffff, 0x1p-24)
DEFINE_LOOP(fused_bfloat16, int16_t, from_bfloat16, 0x7fff, 0x1p-8)
DEFINE_LOOP(fused_float16, int16_t, from_float16, 0x7fff, 0x1p-11)

/* The sum that `fingerprint` takes of a chunk, modulo 2^32. The bits of each element are mixed with their place first. A
   plain product would lose the changes that programs make: with high bits only, these cancel out in a sum. */
#define DEFINE_CHECKSUM(NAME, BITS)                                                                                    \
    uint32_t NAME(const BITS *bits, int64_t count) {                                                                   \
        uint32_t total = 0;                                                                                            \
        for (int64_t start = 0; start < count; start += ROW) {                                                         \
            const int length = count - start < ROW ? (int)(count - start) : ROW;                                       \
            const uint32_t first = (uint32_t)start + 1;                                                                \
            _Pragma("omp simd reduction(+: total)")                                                                    \
            for (int i = 0; i < length; i++) {                                                                         \
                uint32_t mixed = (uint32_t)(int32_t)bits[start + i] ^ ((first + (uint32_t)i) * 2654435761u);           \
                mixed = (mixed ^ (mixed >> 16)) * 2146121005u;                                                         \
                total += (mixed ^ (mixed >> 15)) * 2221713035u;                                                        \
            }                                                                                                          \
        }                                                                                                              \
        return total;                                                                                                  \
    }

DEFINE_CHECKSUM(checksum_int32, int32_t)
DEFINE_CHECKSUM(checksum_int16, int16_t)
