/* Screens of games as policies see them: grey, two made one, smaller, as OpenCV's INTER_AREA does it, and stacked (atari.py).
 * Rows of pixels that look as they did before are not worked out again. */
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

/* What there is of all copies; in atari.py too. Screens are [copies][high->from][wide->from]. */
typedef struct {
    const side *high, *wide;
    int64_t copies, deep, two; /* screens in a stack; whether the brighter of two screens counts */
    const uint8_t *screen;     /* where a screen is found, in colours */
    uint8_t *colours[2];       /* the screens taken last: the newest, and the one before it */
    uint8_t *greys[2], *seen;  /* the same in grey, and what is shown of them */
    uint8_t *small;            /* [copies][deep][high->to][wide->to]: screens made smaller, the newest one at `at` */
    const uint16_t *palette;   /* the grey of a colour; UNKNOWN: not known yet */
    uint8_t *changed;          /* [copies][high->from]: rows of greys */
    uint8_t *all;              /* [copies]: which of both screens are not to be compared with those before */
    uint8_t *fresh, *cut;      /* [copies]: stacks begin anew, black; the newest screen is the one shown last */
} games;
#define UNKNOWN 256

/* Take a copy's screen. 1: some of its colours are not known. */
FAST int screens_take(games *x, int64_t copy, int64_t which) {
    const int64_t high = x->high->from, wide = x->wide->from;
    uint8_t *colours = x->colours[which] + copy * high * wide, *greys = x->greys[which] + copy * high * wide;
    const uint8_t *from = x->screen, all = x->all[copy] >> which & 1;
    unsigned unknown = 0;
    for (int64_t y = 0; y < high; y++, from += wide, colours += wide, greys += wide) {
        if (!all && !memcmp(from, colours, (size_t)wide)) continue;
        unsigned any = 0;
        for (int64_t i = 0; i < wide; i++) any |= x->palette[from[i]], greys[i] = (uint8_t)x->palette[from[i]];
        x->changed[copy * high + y] = 1;
        if (any < UNKNOWN) memcpy(colours, from, (size_t)wide);
        unknown |= any;
    }
    if (unknown >= UNKNOWN) return 1;
    x->all[copy] &= (uint8_t)~(1 << which);
    return 0;
}

/* What is shown of the rows that have changed. */
static inline __attribute__((always_inline)) void show(const games *x, int64_t copy, uint8_t *changed) {
    const int64_t high = x->high->from, wide = x->wide->from, place = copy * high * wide;
    const uint8_t *one = (x->two && x->cut[copy] ? x->seen : x->greys[0]) + place;
    const uint8_t *two = x->two ? x->greys[1] + place : one;
    if (x->fresh[copy] || x->cut[copy]) memset(changed, 1, (size_t)high);
    for (int64_t y = 0; y < high; y++) {
        if (!changed[y]) continue;
        const uint8_t *a = one + y * wide, *b = two + y * wide;
        uint8_t *to = x->seen + place + y * wide;
        for (int64_t i = 0; i < wide; i++) to[i] = a[i] > b[i] ? a[i] : b[i];
    }
}

/* What every copy shows is made smaller, at `at` of those that are kept, and all of them go to the stacks, oldest first. */
FAST void screens_stack(games *x, int64_t at, uint8_t *to) {
    const side *high = x->high, *wide = x->wide;
    const int64_t large = high->from * wide->from, small = high->to * wide->to, deep = x->deep;
    for (int64_t copy = 0; copy < x->copies; copy++) {
        uint8_t *kept = x->small + copy * deep * small, *newest = kept + at * small;
        const uint8_t *last = kept + (at + deep - 1) % deep * small;
        uint8_t *changed = x->changed + copy * high->from;
        show(x, copy, changed);
        if (x->fresh[copy]) memset(kept, 0, (size_t)(deep * small));
        for (int64_t y = 0; y < high->to; y++) {
            const int64_t row = y * wide->to;
            if (memchr(changed + high->first[y], 1, (size_t)high->taps))
                one_row(high, wide, y, x->seen + copy * large, newest + row);
            else memmove(newest + row, last + row, (size_t)wide->to);
        }
        memset(changed, 0, (size_t)high->from);
        for (int64_t each = 1; each <= deep; each++, to += small) memcpy(to, kept + (at + each) % deep * small, (size_t)small);
    }
}
