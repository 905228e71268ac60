/* Which patches of a batch of images are different (images.py): games repeat themselves, from place to place and from
 * image to image. Every patch gets a number; patches that are equal, byte by byte, get the same one. The patches of a
 * layer are told apart by the numbers of the layer below. */
#include "repeats.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define BLOCK 4 /* pixels: the step of the first layer, half of its window */
#define LONGEST 64 /* words that tell a patch */

/* Memory of a thread for what is not handed on; grows as it must. */
static __thread struct {
    void *memory;
    size_t bytes;
} scratch;

static void *reserve(size_t bytes) {
    if (bytes > scratch.bytes) {
        free(scratch.memory);
        scratch.memory = malloc(bytes);
        scratch.bytes = scratch.memory ? bytes : 0;
    }
    return scratch.memory;
}

static inline __attribute__((always_inline)) int same(const uint32_t *one, const uint32_t *two, int64_t words) {
    uint32_t differ = 0;
    for (int64_t at = 0; at < words; at++) differ |= one[at] ^ two[at];
    return !differ;
}

static inline __attribute__((always_inline)) int64_t number(Seen *seen, const uint32_t *patch, int64_t words, uint32_t before) {
    const size_t bytes = (size_t)words * sizeof *patch;
    const int64_t guess = seen->still ? before : seen->last;
    if (guess < seen->count && same(seen->kept + guess * words, patch, words)) return guess;
    uint64_t one = 0x9E3779B97F4A7C15u, two = 0xC2B2AE3D27D4EB4Fu;
    int64_t at = 0;
    for (; at + 4 <= words; at += 4) {
        uint64_t pair[2];
        memcpy(pair, patch + at, sizeof pair);
        one = (one ^ pair[0]) * 0xff51afd7ed558ccdu, two = (two ^ pair[1]) * 0xc4ceb9fe1a85ec53u;
        one ^= one >> 29, two ^= two >> 31;
    }
    for (; at < words; at++) one = (one ^ patch[at]) * 0xff51afd7ed558ccdu, one ^= one >> 29;
    uint64_t slot = (one + two) * 0x9E3779B97F4A7C15u;
    for (slot = slot >> 20 & seen->mask;; slot = (slot + 1) & seen->mask) {
        const uint32_t found = seen->table[slot];
        if (found && !same(seen->kept + (found - 1) * words, patch, words)) continue;
        if (!found) {
            if (seen->count == seen->most) return -1;
            memcpy(seen->kept + seen->count * words, patch, bytes);
            seen->table[slot] = (uint32_t)++seen->count;
        }
        seen->last = seen->table[slot] - 1;
        return (int64_t)seen->last;
    }
}

/* A layer whose windows of size x size numbers move on by step. 0: there are too many different ones. */
static inline __attribute__((always_inline)) int layer(Seen *seen, const uint32_t *from, uint32_t *to, int64_t images,
                                                       int64_t height, int64_t width, int64_t size, int64_t step) {
    uint32_t patch[LONGEST];
    for (int64_t image = 0; image < images; image++, from += height * width)
        for (int64_t y = 0; y + size <= height; y += step)
            for (int64_t x = 0; x + size <= width; x += step) {
                for (int64_t row = 0; row < size; row++)
                    memcpy(patch + row * size, from + (y + row) * width + x, (size_t)size * sizeof *patch);
                const int64_t found = number(seen, patch, size * size, *to);
                if (found < 0) return 0;
                *to++ = (uint32_t)found;
            }
    return 1;
}

static inline __attribute__((always_inline)) int blocks(Seen *seen, const uint8_t *from, uint32_t *to, int64_t images,
                                                        int64_t channels, int64_t height, int64_t width) {
    uint32_t patch[LONGEST];
    for (int64_t image = 0; image < images; image++, from += channels * height * width)
        for (int64_t y = 0; y + BLOCK <= height; y += BLOCK)
            for (int64_t x = 0; x + BLOCK <= width; x += BLOCK) {
                if (x % 64 == 0) /* the blocks below, in time */
                    for (int64_t row = BLOCK; row < 2 * BLOCK; row++)
                        for (int64_t channel = 0; channel < channels; channel++)
                            __builtin_prefetch(from + (channel * height + y + row) * width + x);
                for (int64_t channel = 0; channel < channels; channel++)
                    for (int64_t row = 0; row < BLOCK; row++)
                        memcpy(patch + channel * BLOCK + row, from + (channel * height + y + row) * width + x, BLOCK);
                const int64_t found = channels == 4 ? number(seen, patch, 4 * BLOCK, *to)
                                                    : number(seen, patch, channels * BLOCK, *to);
                if (found < 0) return 0;
                *to++ = (uint32_t)found;
            }
    return 1;
}

uint64_t repeats_slots(int64_t most) {
    uint64_t found = 64;
    while (found < 2 * (uint64_t)most) found *= 2;
    return found;
}

void repeats_sizes(int64_t images, int64_t height, int64_t width, int64_t *places) {
    const int64_t h = height / BLOCK, w = width / BLOCK, h2 = (h - 5) / 2 + 1, w2 = (w - 5) / 2 + 1;
    places[0] = images * h * w, places[1] = images * (h - 1) * (w - 1), places[2] = images * h2 * w2;
    places[3] = images * (h2 - 2) * (w2 - 2);
}

FAST int repeats_more(Seen *seen, const uint8_t *from, int64_t images, int64_t channels, int64_t height, int64_t width,
                      uint32_t *const *to) {
    const int64_t h = height / BLOCK, w = width / BLOCK, h2 = (h - 5) / 2 + 1, w2 = (w - 5) / 2 + 1;
    return blocks(&seen[0], from, to[0], images, channels, height, width) &&
           layer(&seen[1], to[0], to[1], images, h, w, 2, 1) &&
           layer(&seen[2], to[1], to[2], images, h - 1, w - 1, 4, 2) &&
           layer(&seen[3], to[2], to[3], images, h2, w2, 3, 1);
}

/* The patches of the three layers of images of bytes [images][channels][height][width], and of the blocks below them.
 * kept: the different blocks as bytes and patches as numbers of the layer below, of each at most `most`; counts: how
 * many there are; last: the numbers of the last layer, image by image. 0: it is not worth while, or no memory. */
int repeats_find(const uint8_t *from, int64_t images, int64_t channels, int64_t height, int64_t width,
                 uint32_t *const *kept, const int64_t *most, int64_t *counts, uint32_t *last) {
    static const int64_t words[REPEATS_LAYERS] = {0, 4, 16, 9};
    Seen seen[REPEATS_LAYERS];
    int64_t places[REPEATS_LAYERS];
    uint64_t all = 0;
    if (channels * BLOCK > LONGEST) return 0;
    repeats_sizes(images, height, width, places);
    for (int at = 0; at < REPEATS_LAYERS; at++) all += repeats_slots(most[at]);
    uint32_t *table = reserve((size_t)(all + (uint64_t)(places[0] + places[1] + places[2])) * sizeof *table), *next = table;
    if (!table) return 0;
    memset(table, 0, all * sizeof *table);
    for (int at = 0; at < REPEATS_LAYERS; at++) {
        const uint64_t own = repeats_slots(most[at]);
        seen[at] = (Seen){kept[at], at ? words[at] : channels * BLOCK, 0, most[at], next, own - 1, 0, 0};
        next += own;
    }
    uint32_t *const to[REPEATS_LAYERS] = {next, next + places[0], next + places[0] + places[1], last};
    const int fine = repeats_more(seen, from, images, channels, height, width, to);
    for (int at = 0; at < REPEATS_LAYERS; at++) counts[at] = seen[at].count;
    return fine;
}
