/* Screens of games made smaller, as OpenCV's INTER_AREA does it, and stacked (atari.py). */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
/* A product and a sum are rounded one after the other, or pixels would come out otherwise than OpenCV's. */
#pragma GCC optimize("fp-contract=off")
#else
#define FAST
#pragma STDC FP_CONTRACT OFF
#endif
#define WIDEST 512

/* How the pixels of a side of `from` become one of `to`: pixel i is the sum of `taps` of them, weighed, from first[i] on. */
typedef struct {
    int64_t from, to, taps;
    const int32_t *first;
    const float *weight; /* [taps][to] */
} side;

/* One row of pixels of the smaller screen. */
static inline __attribute__((always_inline)) void one_row(const side *high, const side *wide, int64_t y,
                                                          const uint8_t *screen, uint8_t *to) {
    float row[WIDEST], across[WIDEST], sum[WIDEST] = {0};
    for (int64_t down = 0; down < high->taps; down++) {
        const float part = high->weight[down * high->to + y];
        if (part == 0) continue;
        const uint8_t *from = screen + (high->first[y] + down) * wide->from;
        for (int64_t x = 0; x < wide->from; x++) row[x] = from[x];
        for (int64_t x = 0; x < wide->to; x++) across[x] = wide->weight[x] * row[wide->first[x]];
        for (int64_t tap = 1; tap < wide->taps; tap++) {
            const float *weight = wide->weight + tap * wide->to;
            for (int64_t x = 0; x < wide->to; x++) across[x] += weight[x] * row[wide->first[x] + tap];
        }
        for (int64_t x = 0; x < wide->to; x++) sum[x] += part * across[x];
    }
    for (int64_t x = 0; x < wide->to; x++) to[x] = (uint8_t)__builtin_rintf(sum[x]);
}

/* The newest screen of every copy is made smaller and put behind the others of its stack [copies][deep][to][to]. `before`
 * are the screens and stacks of the last call: rows that look like then are copied. fresh: stacks begin anew, black. */
FAST void screens_stack(const side *high, const side *wide, int64_t copies, int64_t deep, const uint8_t *screens,
                        const uint8_t *before, const uint8_t *fresh, const uint8_t *stacks, uint8_t *to) {
    const int64_t large = high->from * wide->from, small = high->to * wide->to, older = (deep - 1) * small;
    for (int64_t at = 0; at < copies; at++, screens += large, before += large, stacks += deep * small) {
        const uint8_t *last = stacks + older;
        if (fresh[at]) memset(to, 0, (size_t)older);
        else memcpy(to, stacks + small, (size_t)older);
        to += older;
        for (int64_t y = 0; y < high->to; y++, to += wide->to, last += wide->to) {
            const int64_t place = high->first[y] * wide->from;
            if (!memcmp(screens + place, before + place, (size_t)(high->taps * wide->from))) memcpy(to, last, (size_t)wide->to);
            else one_row(high, wide, y, screens, to);
        }
    }
}
