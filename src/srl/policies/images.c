/* Images from planes of bytes to interleaved floats, the layout convolutions work in (images.py). */
#include <stdint.h>
#include <string.h>

typedef uint8_t b16 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef float f4 __attribute__((vector_size(16)));

#define LOW (b16){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define HIGH (b16){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}
#define LOW_PAIRS (b16){0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23}
#define HIGH_PAIRS (b16){8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31}

static inline __attribute__((always_inline)) b16 load(const uint8_t *at) {
    b16 found;
    memcpy(&found, at, sizeof found);
    return found;
}

static inline __attribute__((always_inline)) void store4(float *to, b16 from) {
    const f4 numbers = __builtin_convertvector((i4)from, f4);
    memcpy(to, &numbers, sizeof numbers);
}

/* Sixteen bytes as floats: zeros between them make integers. */
static inline __attribute__((always_inline)) void store(float *to, b16 from) {
    const b16 none = {0}, first = __builtin_shuffle(from, none, LOW), second = __builtin_shuffle(from, none, HIGH);
    store4(to, __builtin_shuffle(first, none, LOW_PAIRS));
    store4(to + 4, __builtin_shuffle(first, none, HIGH_PAIRS));
    store4(to + 8, __builtin_shuffle(second, none, LOW_PAIRS));
    store4(to + 12, __builtin_shuffle(second, none, HIGH_PAIRS));
}

/* to [images][pixels][channels] = from [images][channels][pixels] */
void images_interleave(const uint8_t *from, float *to, int64_t images, int64_t channels, int64_t pixels) {
    for (int64_t image = 0; image < images; image++, from += channels * pixels, to += channels * pixels) {
        int64_t at = 0;
        for (; channels == 4 && at + 16 <= pixels; at += 16) {
            const b16 a = load(from + at), b = load(from + pixels + at);
            const b16 c = load(from + 2 * pixels + at), d = load(from + 3 * pixels + at);
            const b16 ab = __builtin_shuffle(a, b, LOW), cd = __builtin_shuffle(c, d, LOW);
            const b16 later_ab = __builtin_shuffle(a, b, HIGH), later_cd = __builtin_shuffle(c, d, HIGH);
            store(to + 4 * at, __builtin_shuffle(ab, cd, LOW_PAIRS));
            store(to + 4 * at + 16, __builtin_shuffle(ab, cd, HIGH_PAIRS));
            store(to + 4 * at + 32, __builtin_shuffle(later_ab, later_cd, LOW_PAIRS));
            store(to + 4 * at + 48, __builtin_shuffle(later_ab, later_cd, HIGH_PAIRS));
        }
        for (; at < pixels; at++)
            for (int64_t channel = 0; channel < channels; channel++)
                to[at * channels + channel] = from[channel * pixels + at];
    }
}
